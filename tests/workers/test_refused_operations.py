"""An operation outside of replicas that raises for its arguments on one worker fails on the others, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from aiodist import (
    IncompleteCollectiveError,
    MultiWorkerMirroredStrategy,
    PerReplica,
    ReplicaContextError,
    Variable,
    get_replica_context,
)
from tests.workers.simulated import Job, unwrapped

pytestmark = pytest.mark.anyio


async def reduce(strategy: MultiWorkerMirroredStrategy, step: int) -> int:
    return int(await strategy.reduce("SUM", step, None))


Refused = Callable[[MultiWorkerMirroredStrategy, bool], Any]


BAD: Any = 7


def replica_function(value: int) -> int:
    return value


def fail(_: Any) -> None:
    raise ValueError("bad batch")


variables: WeakKeyDictionary[MultiWorkerMirroredStrategy, Variable] = WeakKeyDictionary()


REFUSED: dict[str, Refused] = {
    "reduce": lambda s, bad: s.reduce("SUM", "text" if bad else 1, None),
    "gather": lambda s, bad: s.gather(np.ones(2), 5 if bad else 0),
    "run": lambda s, bad: s.run(replica_function, BAD if bad else (1,)),
    "reduce_to": lambda s, bad: s.extended.reduce_to("SUM", 1, BAD if bad else "CPU:0"),
    "update": lambda s, bad: s.extended.update(variables[s], fail if bad else lambda v: v.assign_add(1.0)),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
async def test_call_that_raises_for_its_arguments_on_one_worker_fails_on_the_others(call: Refused) -> None:
    job = Job(1, 1, 1)

    async def worker(strategy: MultiWorkerMirroredStrategy) -> list[Any]:
        with strategy.scope():
            variables[strategy] = Variable(0.0)
        found: list[Any] = [await reduce(strategy, 1)]
        for step in range(3):  # from one line, so that nothing but the refusal tells the steps apart
            try:
                await call(strategy, strategy is job.strategies[1] and step == 1)
                found.append(None)
            except (TypeError, ValueError, IncompleteCollectiveError) as error:
                found.append(error)
        return found

    outcomes = await job.everywhere(worker)
    for rank, found in enumerate(outcomes):
        assert found[:2] == [3, None], found
        assert isinstance(found[3], IncompleteCollectiveError), found
        if rank == 1:
            assert isinstance(found[2], (TypeError, ValueError))
        else:
            assert isinstance(found[2], IncompleteCollectiveError)
            assert found[2].report.suspects == (1,)
            raised = f"because its call raised: {type(outcomes[1][2]).__name__}: {outcomes[1][2]}"
            assert unwrapped(found[2]).startswith(f"replica 1 did not make collective #3, {raised} ")


async def test_call_in_the_wrong_place_is_none_of_the_workers_operations() -> None:
    async def worker(strategy: MultiWorkerMirroredStrategy) -> Any:
        async def replica() -> None:
            if get_replica_context().replica_id_in_sync_group == 1:
                with pytest.raises(ReplicaContextError):
                    await strategy.reduce("SUM", "text", None)

        await strategy.run(replica)
        return await reduce(strategy, 2)

    assert await Job(1, 1).everywhere(worker) == [4, 4]


async def test_errors_name_replicas_by_their_ids_over_all_workers() -> None:
    job = Job(2, 2, answer_seconds=0.01)

    async def one(strategy: MultiWorkerMirroredStrategy) -> None:
        if strategy is job.strategies[1]:  # whose replicas are 2 and 3, while the other one does nothing
            await strategy.reduce("SUM", PerReplica([np.ones(2), np.ones((2, 2))]), None)

    assert "replica 2's is (2,), replica 3's is (2, 2)" in str((await job.everywhere(one))[1])

    async def run(strategy: MultiWorkerMirroredStrategy) -> None:
        await strategy.run(lambda: {get_replica_context().replica_id_in_sync_group: 1})

    assert "value[2] is on replica 2 only" in str((await Job(2, 2).everywhere(run))[1])
