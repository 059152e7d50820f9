"""The same inputs give the same bits: on every tier, in any pieces, in any order of arrival, in every release."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

import aiodist_kernels as kernels
from aiodist_kernels import ReduceOp, plan_for, policy
from tests.project.paths import ROOT
from tests.runtime.programs import Relay, here, on_each, replica

GOLDEN = ROOT / "tests" / "collectives" / "golden_bits.txt"
COUNT = 3
SIZE = 20_011
DTYPES = [np.dtype(name) for name in ("f2", ml_dtypes.bfloat16, "f4", "f8", "i1", "u2", "i4", "i8", "c8")]
CASES = [
    (op, dtype)
    for op, dtype in itertools.product(ReduceOp, DTYPES)
    if dtype.kind != "c" or op in (ReduceOp.SUM, ReduceOp.MEAN)
]


def part(index: int, dtype: np.dtype) -> np.ndarray:
    """Return numbers that do not depend on a library's generator."""
    mixed = (np.arange(SIZE, dtype=np.int64) * 2654435761 + 40503 * index) % 65521 - 32760
    if dtype.kind in "iu":
        return mixed.astype(dtype)
    return (mixed / 777).astype(dtype)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def wanted(op: ReduceOp, dtype: np.dtype) -> str:
    lines = dict(line.rsplit(" ", 1) for line in GOLDEN.read_text(encoding="utf-8").splitlines())
    return lines[f"{op.name} {dtype.name}"]


def test_golden_bits_are_up_to_date(update_golden: bool) -> None:
    lines = [f"{op.name} {dtype.name} {digest(kernels.reduce(op, parts(dtype)))}\n" for op, dtype in CASES]
    if update_golden:
        GOLDEN.write_text("".join(lines), encoding="utf-8")
    assert GOLDEN.read_text(encoding="utf-8") == "".join(lines)


def parts(dtype: np.dtype) -> list[np.ndarray]:
    return [part(index, dtype) for index in range(COUNT)]


# The tests of kernels compare all of them with NumPy; here each op and each dtype is compiled once.
COMPILED = [case for case in CASES if (DTYPES.index(case[1]) + list(ReduceOp).index(case[0])) % len(ReduceOp) == 4]


@pytest.mark.parametrize(("op", "dtype"), COMPILED, ids=lambda p: getattr(p, "name", str(p)))
def test_every_tier_in_any_pieces(op: ReduceOp, dtype: np.dtype) -> None:
    golden = wanted(op, dtype)
    assert digest(kernels.reduce(op, parts(dtype))) == golden
    kernels.warm([plan_for(op, dtype, COUNT, "native")])
    assert digest(kernels.reduce(op, parts(dtype))) == golden
    for pieces in (1, 2, 5):
        cut = kernels.cut(op, parts(dtype), parts=pieces)
        for call in reversed(cut.calls):
            call()
        assert digest(cut.result) == golden


async def _each(op: ReduceOp, dtype: np.dtype, order: Sequence[int]) -> list[str]:
    relay = Relay(order)

    async def program() -> np.ndarray:
        await relay.turn()
        handle = here().all_reduce(op, {"a": part(replica(), dtype), "b": part(replica(), dtype)[:99]})
        relay.pass_on()
        result: np.ndarray = (await handle)["a"]
        return result

    return [digest(result) for result in await on_each(COUNT, program)]


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_any_order_of_arrival_and_threads(dtype: np.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = wanted(ReduceOp.MEAN, dtype)
    for number, order in enumerate(itertools.permutations(range(COUNT))):
        monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1 if number % 2 else 1 << 40)
        assert asyncio.run(_each(ReduceOp.MEAN, dtype, order)) == [golden] * COUNT
