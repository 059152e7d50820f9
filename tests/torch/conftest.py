"""Scripts of torch.distributed on ranks: one process serves all tests of a file; where torch is absent, they skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeAlias

import pytest

from aiodist._torch.run import Server

Run: TypeAlias = Callable[..., dict[str, Any]]

PROLOGUE = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed (the extra torch)")
    with Server() as server:
        yield server


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Run:
    """Run a script, whose first three lines set up `rank` and `size`, on some ranks; return what came of it."""

    def run(script: str, ranks: int = 3, *arguments: str, prologue: str = PROLOGUE, **more: Any) -> dict[str, Any]:
        file = tmp_path / "script.py"
        file.write_text(prologue + dedent(script))
        request = {"script": str(file), "arguments": arguments, "ranks": ranks, "seed": 0, "number": 0,
                   "changes": None, "seconds": 20.0, "cpu": False}  # fmt: skip
        return server.run({**request, **more})

    return run
