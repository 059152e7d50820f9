"""Invalid input: a specific exception at the call, before any other replica is affected, and the run continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import CommunicationOptions, PerReplica, ReplicaContext, ReplicaContextError
from tests.runtime.programs import here, mirrored, on_each, replica, turns

pytestmark = pytest.mark.anyio

Call = tuple[Callable[[Any], Any], type[Exception], str]
X = np.ones(4)
OBJECTS = np.array([object(), None])
PLAIN = make_dataclass("State", ["step"])(1)
OPTIONS = CommunicationOptions()


async def generator(*_: Any) -> Any:
    """Yield where a function should return."""
    yield 1


CALLS: list[Call] = [
    # Reduce ops.
    (lambda c: c.all_reduce("AVERAGE", X), ValueError, "one of SUM, MEAN, MIN, MAX, PRODUCT.*'AVERAGE'"),
    (lambda c: c.all_reduce(3, X), ValueError, "expected a reduce op.*got 3"),
    # Dtypes.
    (lambda c: c.all_reduce("SUM", X > 0), TypeError, "SUM of bool.*cast first"),
    (lambda c: c.all_reduce("MEAN", True), TypeError, "MEAN of bool.*cast first"),
    (lambda c: c.all_reduce("MAX", X * 1j), TypeError, "MAX of complex128.*no order"),
    (lambda c: c.all_reduce("MIN", 1j), TypeError, "MIN of complex.*no order"),
    (lambda c: c.all_reduce("SUM", OBJECTS), TypeError, "SUM of object"),
    (lambda c: c.all_gather(OBJECTS, 0), TypeError, "Python objects would be shared"),
    # Not arrays.
    (lambda c: c.all_reduce("SUM", "text"), TypeError, r"expected a nest of arrays.*builtins\.str: 'text'"),
    (lambda c: c.all_reduce("SUM", object()), TypeError, r"got an object of type builtins\.object"),
    (lambda c: c.broadcast(PLAIN), TypeError, r"@optree\.dataclasses\.dataclass\(namespace='aiodist'\)"),
    (lambda c: c.broadcast({1, 2}), TypeError, r"got an object of type builtins\.set"),
    (lambda c: c.all_reduce("SUM", {"w": [X, "b"]}), TypeError, r"value\['w'\]\[1\]: expected"),
    (lambda c: c.all_reduce("SUM", np.ma.ones(3)), TypeError, r"subclass numpy\.ma.*np\.asarray"),
    (lambda c: c.all_reduce("SUM", PerReplica([X])), TypeError, r"aiodist\.PerReplica; pass it to strategy\.run"),
    # Sources and axes.
    (lambda c: c.broadcast(X, 3), ValueError, "source must be a replica id from 0 to 2, got 3"),
    (lambda c: c.broadcast(X, -1), ValueError, "from 0 to 2, got -1"),
    (lambda c: c.broadcast(X, 1.0), TypeError, "source must be an int, got 1.0"),
    (lambda c: c.broadcast(X, True), TypeError, "source must be an int, got True"),
    (lambda c: c.all_gather(X, 1), ValueError, "axis must be from -1 to 0 for an array with 1 axis"),
    (lambda c: c.all_gather(X, None), TypeError, "axis must be an int, got None"),
    (lambda c: c.all_gather(1.0, 0), ValueError, r"got a scalar; pass np\.array\(\[value\]\)"),
    (lambda c: c.all_gather(np.array(1), -1), ValueError, "at least one axis"),
    (lambda c: c.all_gather({"a": X, "b": X[None]}, 1), ValueError, "axis must be from -1 to 0"),
    (lambda c: c.reduce_scatter("SUM", X), ValueError, "divisible by the 3 replicas, got 4 in shape"),
    (lambda c: c.all_to_all(X), ValueError, "split_axis=0 must be divisible by the 3 replicas"),
    (lambda c: c.all_to_all(np.ones(3), 0, 1), ValueError, "concat_axis must be from -1 to 0"),
    # Names and options.
    (lambda c: c.barrier(name=""), ValueError, "name must not be empty"),
    (lambda c: c.all_reduce("SUM", 1, name=3), TypeError, "name must be a string.*got 3"),
    (lambda c: c.all_reduce("SUM", X, {"timeout": 3}), TypeError, "options must be CommunicationOptions"),
    (lambda c: c.all_reduce("SUM", X, OPTIONS, experimental_hints=OPTIONS), ValueError, "two names"),
    # Buffers for the result: more in tests/collectives/test_host.py.
    (lambda c: c.all_reduce("SUM", X, out=[X]), ValueError, "out must be a nest like the value"),
    (lambda c: c.all_reduce("SUM", X, out=np.ones(3)), ValueError, r"result's shape \(4,\), got \(3,\)"),
    # Members of groups.
    (lambda c: c.new_group([]), ValueError, "must name at least one replica"),
    (lambda c: c.new_group([0, 3]), ValueError, "must be from 0 to 2, got 3"),
    (lambda c: c.new_group([0, -1]), ValueError, "must be from 0 to 2, got -1"),
    (lambda c: c.new_group([0, 1, 0]), ValueError, "once, got 0 twice"),
    (lambda c: c.new_group({0, 1, 2} - {replica()}), ValueError, "which called it, is not among them"),
    (lambda c: c.new_group(0), TypeError, "must be a sequence of replica ids"),
    (lambda c: c.new_group("01"), TypeError, "must be a sequence of replica ids"),
    (lambda c: c.new_group([0, 1.0]), TypeError, "each of replica_ids must be an int"),
    (lambda c: c.new_group([False, 1]), TypeError, "each of replica_ids must be an int"),
    # merge_call.
    (lambda c: c.merge_call(3), TypeError, "merge_call expects a function, got 3"),
    (lambda c: c.merge_call(generator), TypeError, "merge_call got the async generator function .*`return` missing"),
    (lambda c: c.merge_call(print, X), TypeError, r"args must be a tuple or list.*args=\(value,\)"),
    (lambda c: c.merge_call(print, (), [1]), TypeError, "kwargs must be a mapping"),
]


async def test_errors_at_the_call_affect_no_other_replica() -> None:
    """Some replicas make the invalid calls and catch the errors; the others wait in a collective meanwhile."""

    async def program() -> Any:
        for offenders in ([2], [1], [0, 1, 2]):
            if replica() in offenders:
                await turns(2)  # the others wait already, so none of these errors is a mismatch
                for issue, error, text in CALLS:
                    with pytest.raises(error, match=text) as caught:
                        issue(here())
                    assert type(caught.value) is error
            total = await here().all_reduce("SUM", 1)
        return total

    assert await on_each(3, program) == (3, 3, 3)
    assert X.tolist() == [1, 1, 1, 1]
    assert X.flags.writeable


# Calls in the wrong context.


async def test_context_of_another_replica_or_from_outside_the_run() -> None:
    contexts: dict[int, ReplicaContext] = {}
    go = anyio.Event()

    async def program() -> Any:
        contexts[replica()] = here()
        await here().barrier(name="known")
        text = r"replica . of 2 inside replica . of 2; each replica uses its own"
        with pytest.raises(ReplicaContextError, match=text):
            contexts[1 - replica()].all_reduce("SUM", 1)
        with pytest.raises(ReplicaContextError, match="each replica uses its own"):
            await contexts[1 - replica()].run_sync(int)
        await go.wait()
        assert await here().all_reduce("SUM", 1) == 2

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mirrored(2).run, program)
        while len(contexts) < 2:
            await turns(1)
        with pytest.raises(ReplicaContextError, match="outside that replica"):
            contexts[0].barrier()
        go.set()


async def test_collective_from_a_thread() -> None:
    async def program() -> int:
        context = here()

        def work() -> None:
            for call in (lambda: context.all_reduce("SUM", 1), context.barrier, lambda: here().barrier()):
                with pytest.raises(ReplicaContextError, match=r"in the thread 'aiodist CPU:\d.*return the value"):
                    call()

        await context.run_sync(work)
        total: int = await context.all_reduce("SUM", 1)
        return total

    assert await on_each(2, program) == (2, 2)


async def test_context_made_by_hand() -> None:
    strategy = mirrored(2)
    with ReplicaContext(strategy, 1) as context:
        assert aiodist.get_replica_context() is context
        assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (1, 2)
        assert (context.devices, context.strategy) == (("CPU:1",), strategy)
        with pytest.raises(ReplicaContextError, match="made by hand"):
            context.barrier()
    assert aiodist.get_replica_context() is not context
    with ReplicaContext(mirrored(1), 0) as context:
        assert await context.all_reduce("SUM", 3) == 3
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        *((strategy, each, ValueError, f"from 0 to 1, got {each}") for each in (-1, 2, 100)),
        (strategy, "0", TypeError, "must be an int, got '0'"),
        (None, 0, TypeError, "expects a strategy, got None"),
    ]
    for of, replica_id, error, text in wrong:
        with pytest.raises(error, match=text):
            ReplicaContext(of, replica_id)


# strategy.run's own arguments.

FOR_RUN: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *(
        (print, {"args": args}, TypeError, r"args must be a tuple or list, got .*; for one .* write args=\(value,\)")
        for args in ("text", 3, {"a": 1}, np.ones(2), None, iter([1]))
    ),
    *(
        (print, {"kwargs": kwargs}, TypeError, "kwargs must be a mapping from names to values, or None")
        for kwargs in ([("a", 1)], {1: 2}, "ab")
    ),
    (3, {}, TypeError, r"strategy\.run expects a function, got 3"),
    (generator, {}, TypeError, r"strategy\.run got the async generator function .*`return` missing"),
    (print, {"options": "fast"}, TypeError, "options must be CommunicationOptions or None, got 'fast'"),
    *(
        (print, {"args": (given,)}, ValueError, "2 components, one for each replica, got a PerReplica with")
        for given in (PerReplica([1, 2, 3]), {"deep": [PerReplica([1])]})
    ),
]


async def test_wrong_arguments_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    for fn, more, error, text in FOR_RUN:
        with pytest.raises(error, match=text):
            await mirrored(2).run(fn, **more)
    assert capsys.readouterr().out == ""  # nothing was called
    coroutine = asyncio.sleep(0)
    with pytest.raises(TypeError, match=r"pass the function itself, uncalled, .*: run\(sleep, args="):
        await mirrored(2).run(coroutine)  # type: ignore[arg-type]
    coroutine.close()


def test_run_without_an_event_loop_says_what_is_missing() -> None:
    coroutine = mirrored(2).run(lambda: None)
    with pytest.raises((ReplicaContextError, RuntimeError), match="asyncio"):
        coroutine.send(None)
