"""The names of TensorFlow 1 do what those that took their place do."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
from anyio.lowlevel import checkpoint

from aiodist import (
    CommunicationOptions,
    MirroredStrategy,
    PerReplica,
    ReplicaContext,
    Strategy,
    StrategyExtended,
    Variable,
)
from tests.runtime.programs import here, mirrored, replica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


async def batches() -> AsyncIterator[Any]:
    for k in range(2):
        await checkpoint()
        yield PerReplica([k, k + 10])


async def test_experimental_run_takes_the_next_element() -> None:
    strategy = mirrored(2)

    async def program(x: int) -> Any:
        return await here().all_reduce("sum", x)

    for iterator in (batches(), iter([PerReplica([0, 10]), PerReplica([1, 11])])):
        assert (await strategy.experimental_run(program, iterator)).values == (10, 10)
        assert (await strategy.experimental_run(program, iterator)).values == (12, 12)
        with pytest.raises(StopAsyncIteration):
            await strategy.experimental_run(program, iterator)
    assert (await strategy.experimental_run(replica)).values == (0, 1)
    with pytest.raises(TypeError, match="must be an iterator"):
        await strategy.experimental_run(program, [1])


async def test_older_names() -> None:
    def program(x: int, y: int) -> int:
        return x + y + replica()

    strategy = mirrored(2)
    assert (await strategy.experimental_run_v2(program, args=(1,), kwargs={"y": 2})).values == (3, 4)
    assert strategy.unwrap({"a": PerReplica([1, 2])}) == ({"a": 1}, {"a": 2})
    with strategy.scope():
        v = Variable(1.0)
    with strategy.colocate_vars_with(v):
        pass


async def test_group_waits_for_all_there_is_to_await() -> None:
    done = []

    async def work(k: int) -> None:
        await checkpoint()
        done.append(k)

    strategy = mirrored(2)
    assert await strategy.group({"a": PerReplica([work(1), work(2)]), "b": 5}, name="step") is None  # type: ignore[func-returns-value]
    assert done == [1, 2]
    assert await strategy.group(3) is None  # type: ignore[func-returns-value]
    assert await strategy.group([work(3), None]) is None  # type: ignore[func-returns-value]
    assert done == [1, 2, 3]


def test_update_config_proto_returns_a_copy() -> None:
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], order_check="signature")
    strategy.configure(session_config={"log": True})
    config = {"log": {"flags": ["a"]}, "devices": ["CPU:9"]}
    updated = strategy.update_config_proto(config)
    collectives = {"order_check": "signature", **asdict(CommunicationOptions())}
    assert updated == {"log": {"flags": ["a"]}, "devices": ["CPU:0", "CPU:1"], "collectives": collectives}
    updated["log"]["flags"].append("b")
    assert config == {"log": {"flags": ["a"]}, "devices": ["CPU:9"]}


async def test_experimental_hints_and_the_context_manager() -> None:
    with ReplicaContext(Strategy(StrategyExtended(("CPU:0",))), 0) as context:
        assert here() is context
        assert await context.all_reduce("sum", 3, experimental_hints=CommunicationOptions(bytes_per_pack=1)) == 3
