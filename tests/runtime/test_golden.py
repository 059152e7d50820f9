"""The errors' texts, whole: golden/<program>.txt is what a person reads when that program's replicas part."""

from __future__ import annotations

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

THREE = [
    programs.other_kind,
    programs.other_reduce_op,
    programs.other_axis,
    programs.other_source,
    programs.other_key,
    programs.other_shape,
    programs.other_dtype,
    programs.other_array_type,
    programs.other_name,
    programs.other_merge_function,
    programs.other_call_site,
    programs.other_order,
    programs.early_return,
    programs.uneven_loops,
    programs.early_stopping,
    programs.abandoned,
    programs.stuck_elsewhere,
    programs.merge_hangs,
    programs.parted_in_sequence,
    programs.swapped_buckets,
    programs.skipped_in_a_round,
    programs.many_left_the_round,
    programs.added_equal_signature,
    programs.conditional,
    programs.none_for_a_leaf,
    programs.other_merge_arguments,
    programs.racing_tasks,
    programs.lock_across_a_collective,
    programs.queues_in_a_ring,
    programs.group_disagrees,
    programs.group_is_left,
    programs.group_made_elsewhere,
    programs.groups_crossed,
    programs.one_never_joins,
    programs.parted_while_one_has_joined,
]
TIMED = {
    programs.stuck_elsewhere,
    programs.merge_hangs,
    programs.lock_across_a_collective,
    programs.queues_in_a_ring,
}
CASES: list[tuple[Program, int]] = [
    *((program, 3) for program in THREE),
    (programs.tie, 2),
    (programs.outlier_among_many, 512),
    (programs.all_different, 512),
    (programs.many_left, 12),
]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(("program", "replicas"), CASES, ids=[program.__name__ for program, _ in CASES])
async def test_an_error_reads_as_it_should(program: Program, replicas: int, update_golden: bool) -> None:
    error = await error_of(program, replicas, timeout=0.25 if program in TIMED else None)
    text = f"{type(error).__name__}: {error}\n"
    golden = HERE / "golden" / f"{program.__name__}.txt"
    if update_golden:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= SCREEN


ORDERS = [(1, 2, 0), (2, 1, 0), (0, 2, 1)]
UNTIMED = [program for program in THREE if program not in TIMED and program is not programs.abandoned]


@pytest.mark.parametrize("program", UNTIMED, ids=[program.__name__ for program in UNTIMED])
async def test_an_error_reads_the_same_whoever_comes_first(program: Program) -> None:
    async def delayed(ctx: ReplicaContext, order: Sequence[int]) -> Any:
        for _ in range(4 * order[ctx.replica_id_in_sync_group]):
            await anyio.lowlevel.checkpoint()
        return await program(ctx)

    texts = {str(await error_of(partial(delayed, order=order))) for order in ORDERS}
    assert len(texts) == 1, "\n=====\n".join(texts)


@pytest.mark.parametrize("program", [programs.outlier_among_many, programs.all_different, programs.many_left])
async def test_an_error_of_a_thousand_fits_a_screen(program: Program) -> None:
    text = str(await error_of(program, 1024))
    assert len(text.splitlines()) <= SCREEN
    assert max(map(len, text.splitlines())) < 400


def test_every_golden_text_belongs_to_a_program() -> None:
    assert {path.stem for path in HERE.glob("golden/*.txt")} == {program.__name__ for program, _ in CASES}
