"""The errors' texts, whole: golden/<program>.txt is what a person reads when that program's replicas part."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiodist import ReplicaContext
from tests.runtime import golden_programs as programs
from tests.runtime.programs import Program, error_of

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SCREEN = 24

PROGRAMS: list[Program] = [
    program
    for program in vars(programs).values()
    if inspect.iscoroutinefunction(program) and list(inspect.signature(program).parameters) == ["ctx"]
]
REPLICAS: dict[Program, int] = {
    programs.tie: 2,
    programs.outlier_among_many: 512,
    programs.all_different: 512,
    programs.many_left: 12,
}
TIMED = [
    programs.stuck_elsewhere,
    programs.merge_hangs,
    programs.lock_across_a_collective,
    programs.queues_in_a_ring,
]
each_of = partial(pytest.mark.parametrize, "program", ids=lambda program: program.__name__)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@each_of(PROGRAMS)
async def test_an_error_reads_as_it_should(program: Program, update_golden: bool) -> None:
    error = await error_of(program, REPLICAS.get(program, 3), timeout=0.25 if program in TIMED else None)
    text = f"{type(error).__name__}: {error}\n"
    golden = HERE / "golden" / f"{program.__name__}.txt"
    if update_golden:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= SCREEN


ORDERS = [(1, 2, 0), (2, 1, 0), (0, 2, 1)]


@each_of([program for program in PROGRAMS if program not in (*TIMED, *REPLICAS, programs.abandoned)])
async def test_an_error_reads_the_same_whoever_comes_first(program: Program) -> None:
    async def delayed(ctx: ReplicaContext, order: Sequence[int]) -> Any:
        for _ in range(4 * order[ctx.replica_id_in_sync_group]):
            await anyio.lowlevel.checkpoint()
        return await program(ctx)

    texts = {str(await error_of(partial(delayed, order=order))) for order in ORDERS}
    assert len(texts) == 1, "\n=====\n".join(texts)


@each_of([programs.outlier_among_many, programs.all_different, programs.many_left])
async def test_an_error_of_hundreds_fits_a_screen(program: Program) -> None:
    text = str(await error_of(program, 600))
    assert len(text.splitlines()) <= SCREEN
    assert max(map(len, text.splitlines())) < 400


def test_every_golden_text_belongs_to_a_program() -> None:
    assert {path.stem for path in HERE.glob("golden/*.txt")} == {program.__name__ for program in PROGRAMS}
