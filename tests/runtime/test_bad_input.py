"""Bad input: a specific exception at the call, before any other replica is disturbed, and the run goes on."""

from __future__ import annotations

import asyncio
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import CommunicationOptions, PerReplica, ReplicaContext, ReplicaContextError
from tests.runtime.programs import here, mirrored, replica, still_works

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

Call = tuple[str, "Callable[[Any], Any]", type[Exception], str]
X = np.ones(4)
OBJECTS = np.array([object(), None])
PLAIN = make_dataclass("State", ["step"])(1)

CALLS: list[Call] = [
    # Reduce ops.
    ("unknown op", lambda c: c.all_reduce("AVERAGE", X), ValueError, "one of SUM, MEAN, MIN, MAX, PRODUCT.*'AVERAGE'"),
    ("op that is no name", lambda c: c.all_reduce(3, X), ValueError, "expected a reduce op.*got 3"),
    ("op None", lambda c: c.reduce_scatter(None, X), ValueError, "expected a reduce op.*got None"),
    # Dtypes.
    ("SUM of bool", lambda c: c.all_reduce("SUM", X > 0), TypeError, "SUM of bool.*cast first"),
    ("MEAN of Python bool", lambda c: c.all_reduce("MEAN", True), TypeError, "MEAN of bool.*cast first"),
    ("MAX of complex", lambda c: c.all_reduce("MAX", X * 1j), TypeError, "MAX of complex128.*no order"),
    ("MIN of Python complex", lambda c: c.all_reduce("MIN", 1j), TypeError, "MIN of complex.*no order"),
    ("sum of objects", lambda c: c.all_reduce("SUM", OBJECTS), TypeError, "SUM of object"),
    ("sum of strings", lambda c: c.all_reduce("SUM", np.array(["a"])), TypeError, "SUM of <U1"),
    ("gather of objects", lambda c: c.all_gather(OBJECTS, 0), TypeError, "Python objects would be shared"),
    ("broadcast of objects", lambda c: c.broadcast(OBJECTS), TypeError, "Python objects would be shared"),
    ("exchange of objects", lambda c: c.all_to_all(OBJECTS), TypeError, "Python objects would be shared"),
    # What is no array.
    (
        "string",
        lambda c: c.all_reduce("SUM", "text"),
        TypeError,
        r"expected a nest of arrays.*builtins\.str: 'text'",
    ),
    ("object", lambda c: c.all_reduce("SUM", object()), TypeError, r"got an object of type builtins\.object"),
    ("dataclass", lambda c: c.broadcast(PLAIN), TypeError, r"@optree\.dataclasses\.dataclass\(namespace='aiodist'\)"),
    ("set", lambda c: c.broadcast({1, 2}), TypeError, r"got an object of type builtins\.set"),
    ("object inside", lambda c: c.all_reduce("SUM", {"w": [X, "b"]}), TypeError, r"value\['w'\]\[1\]: expected"),
    ("masked array", lambda c: c.all_reduce("SUM", np.ma.ones(3)), TypeError, r"subclass numpy\.ma.*np\.asarray"),
    ("per-replica value", lambda c: c.all_reduce("SUM", PerReplica([X])), TypeError, r"aiodist\.PerReplica"),
    # Sources and axes.
    ("source too high", lambda c: c.broadcast(X, 3), ValueError, "source must be a replica id from 0 to 2, got 3"),
    ("source negative", lambda c: c.broadcast(X, -1), ValueError, "from 0 to 2, got -1"),
    ("source no int", lambda c: c.broadcast(X, 1.0), TypeError, "source must be a replica id, an int, got 1.0"),
    ("source bool", lambda c: c.broadcast(X, True), TypeError, "source must be a replica id, an int, got True"),
    ("axis too high", lambda c: c.all_gather(X, 1), ValueError, "axis must be from -1 to 0 for an array with 1 axes"),
    ("axis too low", lambda c: c.all_gather(X, -2), ValueError, "axis must be from -1 to 0.*got -2"),
    ("axis no int", lambda c: c.all_gather(X, None), TypeError, "axis must be an int, got None"),
    ("gather of a scalar", lambda c: c.all_gather(1.0, 0), ValueError, r"got a scalar; pass np\.array\(\[value\]\)"),
    ("gather of a 0-d array", lambda c: c.all_gather(np.array(1), -1), ValueError, "at least one axis"),
    ("axis in a nest", lambda c: c.all_gather({"a": X, "b": X[None]}, 1), ValueError, "axis must be from -1 to 0"),
    ("scatter axis", lambda c: c.reduce_scatter("SUM", X, axis=2), ValueError, "axis must be from -1 to 0"),
    ("uneven scatter", lambda c: c.reduce_scatter("SUM", X), ValueError, "divisible by the 3 replicas, got 4 in shape"),
    ("uneven exchange", lambda c: c.all_to_all(X), ValueError, "split_axis=0 must be divisible by the 3 replicas"),
    ("concat axis", lambda c: c.all_to_all(np.ones(3), 0, 1), ValueError, "concat_axis must be from -1 to 0"),
    # Names and options.
    ("empty name", lambda c: c.barrier(name=""), ValueError, "name must not be empty"),
    ("name no string", lambda c: c.all_reduce("SUM", 1, name=3), TypeError, "name must be a string.*got 3"),
    ("name of a gather", lambda c: c.all_gather(X, 0, name=""), ValueError, "name must not be empty"),
    ("name of a merge", lambda c: c.merge_call(print, name=b"x"), TypeError, "name must be a string"),
    (
        "options no options",
        lambda c: c.all_reduce("SUM", X, {"timeout": 3}),
        TypeError,
        "options must be CommunicationOptions",
    ),
    (
        "options twice",
        lambda c: c.all_reduce("SUM", X, CommunicationOptions(), experimental_hints=CommunicationOptions()),
        ValueError,
        "two names of one argument",
    ),
    # out=
    (
        "out of another structure",
        lambda c: c.all_reduce("SUM", X, out=[X]),
        ValueError,
        "out must be a nest like the value",
    ),
    (
        "out of another shape",
        lambda c: c.all_reduce("SUM", X, out=np.ones(3)),
        ValueError,
        r"result's shape \(4,\), got \(3,\)",
    ),
    (
        "out of another dtype",
        lambda c: c.all_reduce("SUM", X, out=np.ones(4, "f4")),
        TypeError,
        "dtype float64, got float32",
    ),
    (
        "out of an integer mean",
        lambda c: c.all_reduce("MEAN", np.arange(2), out=np.arange(2)),
        TypeError,
        "dtype float64",
    ),
    ("out for a number", lambda c: c.all_reduce("SUM", 1, out=np.ones(())), TypeError, "out must hold arrays"),
    ("out read-only", lambda c: c.all_reduce("SUM", X, out=np.broadcast_to(1.0, 4)), ValueError, "must be writeable"),
    # merge_call and run_sync.
    ("merge of no function", lambda c: c.merge_call(3), TypeError, "merge_call expects a function, got 3"),
    ("merge args", lambda c: c.merge_call(print, X), TypeError, r"args must be a tuple or list.*args=\(value,\)"),
    ("merge args string", lambda c: c.merge_call(print, "ab"), TypeError, "args must be a tuple or list, got 'ab'"),
    ("merge kwargs", lambda c: c.merge_call(print, (), [1]), TypeError, "kwargs must be a mapping"),
]


@pytest.mark.parametrize("call", CALLS, ids=[name for name, *_ in CALLS])
async def test_error_at_the_call_disturbs_nobody(call: Call) -> None:
    """Replica 1 makes the bad call, catches the error and goes on; then all of them do."""
    _, issue, error, text = call

    async def program() -> Any:
        context = here()
        for offenders in ([1], [0, 1, 2]):
            total = await context.all_reduce("SUM", 1, name="before")
            if replica() in offenders:
                with pytest.raises(error, match=text) as caught:
                    issue(context)
                assert type(caught.value) is error
        return total + await context.all_reduce("SUM", 1, name="after")

    strategy = mirrored(3)
    assert await strategy.run(program) == 6
    await still_works(strategy)
    assert X.tolist() == [1, 1, 1, 1]
    assert X.flags.writeable


async def test_errors_while_others_wait_in_a_collective() -> None:
    """The bad calls of the last arrival are checked in themselves, not taken for a mismatch."""
    waiting = [anyio.Event(), anyio.Event()]

    async def program() -> Any:
        context = here()
        if replica() < 2:
            handle = context.all_reduce("SUM", np.ones(2), name="met")
            waiting[replica()].set()
            return (await handle).tolist()
        for event in waiting:
            await event.wait()
        for _, issue, error, text in CALLS:
            with pytest.raises(error, match=text):
                issue(context)
        return (await context.all_reduce("SUM", np.ones(2), name="met")).tolist()

    # One name stands for the two places: where the others are, and where the last one is.
    strategy = mirrored(3)
    assert strategy.experimental_local_results(await strategy.run(program)) == ([3, 3],) * 3


async def test_collective_in_cross_replica_context() -> None:
    contexts: list[Any] = []

    async def program() -> None:
        contexts.append(here())
        await here().barrier()

    strategy = mirrored(2)
    await strategy.run(program)
    with strategy.scope():
        assert aiodist.get_replica_context() is None
        with pytest.raises(ReplicaContextError, match="cross-replica context") as caught:
            ReplicaContext(mirrored(1), 0).barrier()
    assert "strategy.reduce" in str(caught.value)


async def test_collective_after_the_run_has_ended() -> None:
    contexts: list[Any] = []

    async def program() -> None:
        contexts.append(here())
        await here().barrier()

    await mirrored(2).run(program)
    for call in (contexts[0].barrier, lambda: contexts[1].all_reduce("SUM", 1)):
        with pytest.raises(ReplicaContextError, match="whose function has ended"):
            call()


async def test_collective_of_a_child_that_outlives_its_replica() -> None:
    refused = []
    ended = anyio.Event()

    async with anyio.create_task_group() as outside:

        async def child(context: Any) -> None:
            await ended.wait()
            with pytest.raises(ReplicaContextError, match="whose function has ended"):
                context.barrier()
            refused.append(True)

        def program() -> None:
            outside.start_soon(child, here())

        await mirrored(2).run(program)
        ended.set()
    assert refused == [True, True]


async def test_collective_through_another_replicas_context() -> None:
    contexts: dict[int, Any] = {}

    async def program() -> Any:
        contexts[replica()] = here()
        await here().barrier(name="known")
        with pytest.raises(
            ReplicaContextError, match=r"replica . of 2 inside replica . of 2; each replica uses its own"
        ):
            contexts[1 - replica()].all_reduce("SUM", 1)
        return await here().all_reduce("SUM", 1)

    assert await mirrored(2).run(program) == 2


async def test_collective_through_a_replicas_context_from_outside_the_run() -> None:
    contexts: list[Any] = []
    go = anyio.Event()
    known = anyio.Event()

    async def program() -> None:
        contexts.append(here())
        known.set()
        await go.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mirrored(2).run, program)
        await known.wait()
        with pytest.raises(ReplicaContextError, match="outside that replica"):
            contexts[0].barrier()
        go.set()


async def test_context_made_by_hand_of_several_replicas() -> None:
    strategy = mirrored(2)
    with ReplicaContext(strategy, 1) as context:
        assert aiodist.get_replica_context() is context
        assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (1, 2)
        assert context.devices == ("CPU:1",)
        assert context.strategy is strategy
        with pytest.raises(ReplicaContextError, match="made by hand"):
            context.barrier()
    assert aiodist.get_replica_context() is not context


async def test_context_made_by_hand_of_one_replica_works() -> None:
    with ReplicaContext(mirrored(1), 0) as context:
        assert await context.all_reduce("SUM", 3) == 3


@pytest.mark.parametrize("replica_id", [-1, 2, 100])
async def test_context_made_by_hand_of_no_replica(replica_id: int) -> None:
    with pytest.raises(ValueError, match=f"from 0 to 1, got {replica_id}"):
        ReplicaContext(mirrored(2), replica_id)


async def test_context_made_by_hand_of_something_else() -> None:
    with pytest.raises(TypeError, match="expects a strategy, got None"):
        ReplicaContext(None, 0)
    with pytest.raises(TypeError, match="must be a replica id, an int, got '0'"):
        ReplicaContext(mirrored(2), "0")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_context_is_neither_shared_nor_kept_by_a_with_block() -> None:
    async def program() -> bool:
        with here() as context:
            inside = aiodist.get_replica_context() is context
        await here().barrier()
        return inside and aiodist.get_replica_context() is context

    assert await mirrored(2).run(program) is True


async def test_repr_of_a_context() -> None:
    async def program() -> str:
        return repr(here())

    result = await mirrored(2).run(program)
    assert result.values[1] == "<ReplicaContext: replica 1 of 2 on CPU:1>"


# strategy.run's own arguments.


@pytest.mark.parametrize(
    "args", ["text", 3, {"a": 1}, np.ones(2), None, pytest.param(iter([1]), id="iterator")], ids=repr
)
async def test_args_of_run_that_are_no_tuple(args: Any) -> None:
    called: list[Any] = []
    with pytest.raises(
        TypeError, match=r"args must be a tuple or list, got .*; for one argument write args=\(value,\)"
    ):
        await mirrored(2).run(called.append, args=args)
    assert not called


@pytest.mark.parametrize("kwargs", [[("a", 1)], {1: 2}, "ab"], ids=repr)
async def test_kwargs_of_run_that_are_no_mapping_from_names(kwargs: Any) -> None:
    with pytest.raises(TypeError, match="kwargs must be a mapping from names to values, or None"):
        await mirrored(2).run(print, kwargs=kwargs)


async def test_run_of_no_function_and_options_that_are_none() -> None:
    with pytest.raises(TypeError, match=r"strategy\.run expects a function, got 3"):
        await mirrored(2).run(3)  # type: ignore[arg-type]
    called = asyncio.sleep(0)
    with pytest.raises(TypeError, match=r"pass the function itself, uncalled, .*: run\(sleep, args="):
        await mirrored(2).run(called)  # type: ignore[arg-type]
    called.close()
    with pytest.raises(TypeError, match="options must be CommunicationOptions or None, got 'fast'"):
        await mirrored(2).run(print, options="fast")  # type: ignore[arg-type]


async def test_per_replica_argument_of_another_length() -> None:
    for args in ((PerReplica([1, 2, 3]),), ({"deep": [PerReplica([1])]},)):
        with pytest.raises(ValueError, match="2 components, one for each replica, got a PerReplica with"):
            await mirrored(2).run(print, args=args)


async def test_run_inside_a_replica() -> None:
    strategy = mirrored(2)

    async def program() -> Any:
        with pytest.raises(ReplicaContextError, match=r"strategy\.run was called inside replica .; .*merge_call"):
            await strategy.run(print)
        with pytest.raises(ReplicaContextError, match=r"strategy\.reduce was called inside replica"):
            await strategy.reduce("SUM", 1, None)
        with pytest.raises(ReplicaContextError, match=r"strategy\.gather was called inside replica"):
            await strategy.gather(np.ones(1), 0)
        return await here().all_reduce("SUM", 1)

    assert await strategy.run(program) == 2


async def test_run_of_another_strategy_inside_a_replica_or_a_scope() -> None:
    strategy, other = mirrored(2), mirrored(3)

    async def program() -> Any:
        with pytest.raises(ReplicaContextError, match=r"under another strategy.*strategies do not nest"):
            await other.run(print)
        return await here().all_reduce("SUM", 1)

    assert await strategy.run(program) == 2
    with strategy.scope(), pytest.raises(ReplicaContextError, match="under another strategy"):
        await other.run(print)
    await still_works(other)
