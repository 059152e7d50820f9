"""What is copied and what is not: memory going in, results coming back, and nobody's result being another's."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist._arrays.host import HostType, host_type_of
from tests.frameworks.frameworks import Framework, seen
from tests.runtime.programs import here, on_each, replica


def whose(leaf: Any) -> HostType:
    found = host_type_of(leaf)
    assert found is not None
    return found


def test_view_shares_memory_with_the_foreign_array(framework: Framework) -> None:
    given = framework.make(np.arange(6, dtype=np.float32))
    view = whose(given).view(given)
    assert np.shares_memory(view, seen(given))


def test_view_of_bfloat16_shares_memory_with_a_tensor() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    given = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    view = whose(given).view(given)
    given[0] = 4
    assert view.tolist() == [4, -2]


def test_result_is_the_array_of_the_framework_over_the_same_memory(framework: Framework) -> None:
    # JAX takes over only memory that is aligned to 64 bytes; what it copies nobody can change either.
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    given = whose(framework.make(array)).give(array)
    assert isinstance(given, framework.type)
    assert seen(given).tolist() == [0, 1, 2, 3, 4, 5]
    if framework.mutable:
        assert np.shares_memory(seen(given), array)


def test_part_with_gaps_gets_memory_of_its_own(framework: Framework) -> None:
    array = np.arange(6, dtype=np.float32)
    given = whose(framework.make(array)).give(array[::-2])
    assert seen(given).tolist() == [5, 3, 1]
    assert not np.shares_memory(seen(given), array)


def test_each_gets_memory_of_its_own_of_which_one_is_no_copy(framework: Framework) -> None:
    array = np.arange(6, dtype=np.float32)
    parts = [seen(part) for part in whose(framework.make(array)).give_each(array, 3)]
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4, 5]] * 3
    if framework.mutable:
        assert [np.shares_memory(part, array) for part in parts] == [False, False, True]
        assert not any(np.shares_memory(parts[i], parts[j]) for i in range(3) for j in range(i))
    else:
        assert not any(part.flags.writeable for part in parts)


@pytest.mark.anyio
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"])
async def test_replica_that_changes_its_result_changes_nobody_elses(framework: Framework, collective: str) -> None:
    if not framework.mutable:
        pytest.skip("its arrays cannot be changed")

    async def program() -> list[float]:
        ctx, mine = here(), framework.make(np.arange(6, dtype=np.float32))
        calls = {
            "all_reduce": lambda: ctx.all_reduce("SUM", mine),
            "all_gather": lambda: ctx.all_gather(mine, 0),
            "broadcast": lambda: ctx.broadcast(mine),
            "reduce_scatter": lambda: ctx.reduce_scatter("SUM", mine),
            "all_to_all": lambda: ctx.all_to_all(mine),
        }
        result = seen(await calls[collective]())
        before = result.tolist()
        result[:] = [value + 100 * (replica() + 1) for value in before]
        await ctx.barrier()
        assert result.tolist() == [value + 100 * (replica() + 1) for value in before]
        mine_now: list[float] = seen(mine).tolist()
        return mine_now

    assert await on_each(3, program) == ([0, 1, 2, 3, 4, 5],) * 3


@pytest.mark.anyio
async def test_out_is_the_framework_s_own_memory(framework: Framework) -> None:
    if not framework.mutable:
        pytest.skip("its arrays cannot be changed")

    async def program() -> list[float]:
        out = framework.make(np.zeros(2, np.float32))
        result = await here().all_reduce("SUM", framework.make(np.ones(2, np.float32)), out=out)
        assert result is out
        values: list[float] = seen(out).tolist()
        return values

    assert await on_each(2, program) == ([2, 2],) * 2


@pytest.mark.anyio
async def test_out_that_cannot_be_changed_is_refused() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")

    async def program() -> None:
        here().all_reduce("SUM", jax.numpy.ones(2), out=jax.numpy.zeros(2))

    with pytest.raises(ValueError, match="writeable"):
        await on_each(1, program)


def test_no_framework_is_imported_for_it() -> None:
    assert host_type_of(aiodist) is None
    assert host_type_of(np.ones(2)) is None
    assert not any(name in sys.modules for name in ("cupy", "tensorflow"))
