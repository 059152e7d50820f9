"""Scripts of torch.distributed on ranks: a process with torch serves all tests; without torch they skip."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from tests.project.paths import ROOT

if TYPE_CHECKING:
    from aiodist._torch.script import Checked

Run: TypeAlias = Callable[..., Any]

PROLOGUE = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""


def _serve(connection: Connection) -> None:
    os.chdir(ROOT)
    import_module("torch._dynamo")  # once, not in every fork
    from aiodist._torch.script import Request, check

    while True:
        fields, schedules = connection.recv()
        connection.send(check(Request(**fields), schedules))


@pytest.fixture(scope="session")
def server() -> Iterator[Connection]:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed (the extra torch)")
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    yield here
    process.kill()
    process.join()


@pytest.fixture
def checked(server: Connection, tmp_path: Path) -> Run:
    """Check a script, whose first three lines set up `rank` and `size`, on some ranks; return what came of it."""

    def checked(
        script: str, ranks: int = 3, *arguments: str, prologue: str = PROLOGUE, schedules: int = 1, **more: Any
    ) -> Checked:
        file = tmp_path / "script.py"
        file.write_text(prologue + dedent(script))
        server.send(({"script": str(file), "arguments": arguments, "ranks": ranks, "seconds": 20.0, **more}, schedules))
        found: Checked = server.recv()
        return found

    return checked


@pytest.fixture
def run(checked: Run) -> Run:
    """Check a script; return how its last run ended."""
    return lambda *arguments, **more: checked(*arguments, **more).outcome
