"""``out=``: results in the caller's own buffers, whatever they overlap, without a copy where that can be."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiodist_kernels as kernels
from aiodist_kernels import policy
from tests.runtime.programs import here, mirrored, on_each, replica

LENGTH = 6
ARENA = 48
places = st.integers(0, ARENA - LENGTH)


@st.composite
def disjoint(draw: st.DrawFn) -> list[int]:
    """Return places of four buffers that do not overlap each other."""
    gaps = draw(st.lists(st.integers(0, 5), min_size=4, max_size=4))
    starts = [sum(gaps[: i + 1]) + i * LENGTH for i in range(4)]
    order = draw(st.permutations(range(4)))
    return [starts[i] for i in order]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("off_loop", [False, True])
@pytest.mark.parametrize("brought", [(0, 1), (0,), (1,)])
@settings(max_examples=25)
@given(inputs=st.lists(places, min_size=4, max_size=4), outs=disjoint(), op=st.sampled_from(["SUM", "MEAN", "MAX"]))
def test_buffers_that_overlap_inputs(
    backend: str, off_loop: bool, brought: tuple[int, ...], inputs: list[int], outs: list[int], op: str
) -> None:  # fmt: skip
    arena = np.random.default_rng(3).uniform(1, 2, ARENA).astype(np.float32)

    def at(place: int) -> np.ndarray:
        return arena[place : place + LENGTH]

    def value(replica_id: int) -> dict[str, np.ndarray]:
        return {"a": at(inputs[replica_id]), "b": at(inputs[2 + replica_id])}

    def buffers(replica_id: int) -> dict[str, np.ndarray]:
        return {"a": at(outs[replica_id]), "b": at(outs[2 + replica_id])}

    copies = [{key: leaf.copy() for key, leaf in value(i).items()} for i in range(2)]

    async def program(bring: bool) -> Any:
        mine = buffers(replica()) if replica() in brought and bring else None
        result = await here().all_reduce(op, copies[replica()] if not bring else value(replica()), out=mine)
        assert mine is None or all(result[key] is mine[key] for key in mine)
        return result

    async def main() -> tuple[Any, ...]:
        wanted = (await on_each(2, program, False))[0]
        wanted = {key: leaf.copy() for key, leaf in wanted.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "BLOCKING_FROM_MOVED", 1 if off_loop else 1 << 40)
            return wanted, *(await on_each(2, program, True))

    wanted, *results = anyio.run(main, backend=backend)
    for result in results:
        for key, leaf in result.items():
            assert leaf.tobytes() == wanted[key].tobytes()


@pytest.mark.anyio
async def test_result_is_written_straight_into_the_first_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[Any] = []
    plain = kernels.reduce

    def spy(op: Any, leaves: Any, *, out: Any = None, accumulate: Any = "native") -> Any:
        targets.append(out)
        return plain(op, leaves, out=out, accumulate=accumulate)

    monkeypatch.setattr(kernels, "reduce", spy)
    outs = [[np.empty(3), np.empty((2, 2), order="F")] for _ in range(2)]

    async def program() -> None:
        await here().all_reduce("SUM", [np.ones(3), np.ones((2, 2))], out=outs[replica()])

    await mirrored(2).run(program)
    assert targets[0] is outs[0][0]
    assert targets[1] is outs[0][1]
    assert [leaf.ravel().tolist() for leaves in outs for leaf in leaves] == [[2.0] * 3, [2.0] * 4] * 2


@pytest.mark.anyio
async def test_every_replica_reduces_in_place() -> None:
    async def program() -> list[float]:
        mine = np.arange(3.0) + replica()
        assert await here().all_reduce("SUM", mine, out=mine) is mine
        numbers: list[float] = mine.tolist()
        return numbers

    assert await on_each(3, program) == ([3.0, 6.0, 9.0],) * 3


@pytest.mark.anyio
@pytest.mark.parametrize("layout", ["strided", "F", "big"])
async def test_buffers_of_any_layout(layout: str) -> None:
    async def program() -> Any:
        out: np.ndarray = {
            "strided": np.zeros((4, 6, 2))[..., 1],
            "F": np.zeros((4, 6), order="F"),
            "big": np.zeros((300, 600))[::75, ::100],
        }[layout]
        await here().all_reduce("MEAN", np.arange(24).reshape(4, 6) + replica(), out=out)
        return out.tolist()

    assert (await on_each(2, program))[0] == (np.arange(24).reshape(4, 6) + 0.5).tolist()
