"""``out=`` of arrays on planted GPUs: buffers that may overlap inputs, written directly if possible."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import MirroredStrategy, ReduceOp, get_replica_context, set_logical_devices
from aiodist_kernels import reduce
from tests.gpu.conftest import Plant, PlantedArray, planted_machine
from tests.kernels import arrays
from tests.kernels.arrays import SINGLE, assert_same_bits

LENGTH, ARENA = 6, 60
ORDINALS = [0, 0, 1]
places = st.integers(0, ARENA - LENGTH)


@st.composite
def disjoint(draw: st.DrawFn) -> list[int]:
    """Return the offsets of six buffers that do not overlap each other."""
    gaps = draw(st.lists(st.integers(0, 4), min_size=6, max_size=6))
    starts = [sum(gaps[: i + 1]) + i * LENGTH for i in range(6)]
    order = draw(st.permutations(range(6)))
    return [starts[i] for i in order]


@settings(max_examples=150)
@given(
    seed=arrays.seeds,
    inputs=st.lists(places, min_size=6, max_size=6),
    outs=disjoint(),
    given=st.sets(st.integers(0, 2), min_size=1),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]),
    in_place=st.booleans(),
    wall=st.booleans(),
)
def test_buffers_that_overlap_inputs(
    seed: int, inputs: list[int], outs: list[int], given: set[int], op: ReduceOp, *, in_place: bool, wall: bool
) -> None:
    """Replicas share an arena on each GPU."""
    if in_place:
        inputs = outs
    values = np.random.default_rng(seed).uniform(1, 2, ARENA).astype(SINGLE)
    wanted = [reduce(op, [values[inputs[leaf + 2 * r] :][:LENGTH] for r in range(3)]) for leaf in range(2)]

    with pytest.MonkeyPatch.context() as patch:
        machine = planted_machine(patch, 2, seed=seed, walls={frozenset({0, 1})} if wall else set())
        set_logical_devices("GPU:0", 2)
        arenas = [machine.put(values, ordinal) for ordinal in range(2)]

        def parts(begins: list[int], me: int) -> list[PlantedArray]:
            memory = arenas[ORDINALS[me]].memory
            begins = begins[2 * me : 2 * me + 2]
            return [PlantedArray(memory, (LENGTH,), SINGLE, ORDINALS[me], offset=4 * begin) for begin in begins]

        async def program() -> list[PlantedArray]:
            me = get_replica_context().replica_id_in_sync_group
            mine, out = parts(inputs, me), parts(outs, me)
            if me not in given:
                result: list[PlantedArray] = await get_replica_context().all_reduce(op, mine, name="all")
                return result
            result = await get_replica_context().all_reduce(op, mine, out=out, name="all")
            assert all(one is other for one, other in zip(result, out, strict=True))
            return result

        strategy = MirroredStrategy()
        for results in strategy.experimental_local_results(anyio.run(strategy.run, program)):
            for result, numbers in zip(results, wanted, strict=True):
                assert_same_bits(result.numpy(), numbers)


@pytest.mark.anyio
async def test_result_is_written_directly_into_buffers(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = plant(2)
    outs = [machine.put(np.zeros(8, SINGLE), k) for k in range(2)]
    inputs = [machine.put(np.full(8, k + 1, SINGLE), k) for k in range(2)]
    monkeypatch.setattr(machine.driver, "allocate", lambda *_: pytest.fail("there is memory for the results"))

    async def step() -> None:
        me = get_replica_context().replica_id_in_sync_group
        assert await get_replica_context().all_reduce("SUM", inputs[me], out=outs[me]) is outs[me]

    await MirroredStrategy().run(step)
    assert [out.numpy().tolist() for out in outs] == [[3.0] * 8] * 2


@pytest.mark.anyio
async def test_host_and_device_buffers_in_one_nest(plant: Plant) -> None:
    machine = plant(2)
    kept: dict[int, dict[str, Any]] = {}

    async def step() -> None:
        me = get_replica_context().replica_id_in_sync_group
        memory = machine.put(np.zeros(25, SINGLE), me).memory
        kept[me] = {"device": PlantedArray(memory, (4, 6), SINGLE, me, offset=4), "host": np.zeros(3)}
        value = machine.put(np.arange(24, dtype=SINGLE).reshape(4, 6) + me, me)
        asked: dict[str, Any] = {"device": value, "host": np.full(3, me)}
        if me:
            result = await get_replica_context().all_reduce("MEAN", asked, out=kept[me], name="all")
            assert all(result[key] is kept[me][key] for key in result)
        else:
            result = await get_replica_context().all_reduce("MEAN", asked, name="all")
            assert result["device"].numpy().tolist() == (np.arange(24).reshape(4, 6) + 0.5).tolist()

    await MirroredStrategy().run(step)
    assert_same_bits(kept[1]["device"].numpy(), np.arange(24, dtype=SINGLE).reshape(4, 6) + np.float32(0.5))
    assert kept[1]["host"].tolist() == [0.5] * 3


@pytest.mark.anyio
async def test_invalid_buffers_are_refused(plant: Plant) -> None:
    machine = plant(2)

    async def step() -> None:
        me = get_replica_context().replica_id_in_sync_group
        value = machine.put(np.ones(4, SINGLE), me)

        def refuses(error: type[Exception], match: str, out: Any, op: str = "SUM") -> None:
            with pytest.raises(error, match=match):
                get_replica_context().all_reduce(op, value, out=out)

        refuses(TypeError, "planted arrays on GPUs, where the value has them, got a numpy.ndarray", np.ones(4, SINGLE))
        refuses(ValueError, "a nest like the value, a single array", [machine.put(np.ones(4, SINGLE), me)])
        refuses(TypeError, "dtype float32, got float64", machine.put(np.ones(4), me))
        refuses(ValueError, r"shape \(4,\), got \(2, 2\)", machine.put(np.ones((2, 2), SINGLE), me))
        refuses(ValueError, "on the value's GPU", machine.put(np.ones(4, SINGLE), 1 - me))
        read_only = machine.put(np.ones(4, SINGLE), me)
        read_only.read_only = True
        refuses(TypeError, "writeable, got a read-only array", read_only)
        with pytest.raises(ValueError, match="a buffer of its own for each leaf"):
            get_replica_context().all_reduce("SUM", [value, value], out=[value, value])

    await MirroredStrategy().run(step)
