"""A replica's own exception cancels the others, and comes out of run as itself."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiodist import CollectiveError, CollectiveMismatchError
from tests.runtime.programs import here, mirrored, replica, still_works

pytestmark = pytest.mark.anyio


class FirstError(Exception):
    pass


class SecondError(Exception):
    pass


def error_out(kind: type[Exception]) -> None:
    raise kind


async def test_exception_comes_out_as_itself_with_a_note() -> None:
    error = FirstError("mine")

    async def program() -> None:
        if replica() == 1:
            raise error
        await here().barrier()

    strategy = mirrored(3)
    with pytest.raises(FirstError) as caught:
        await strategy.run(program)
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith("replica 1 of 3 on CPU:1")
    assert "replica 0 was waiting in barrier #0 at " in note
    await still_works(strategy)


async def test_exception_of_a_plain_function() -> None:
    def program() -> None:
        if replica() == 0:
            raise FirstError

    with pytest.raises(FirstError) as caught:
        await mirrored(3).run(program)
    assert caught.value.__notes__ == ["replica 0 of 3 on CPU:0"]


async def test_others_are_cancelled_and_unwind() -> None:
    unwound = []

    async def program() -> None:
        try:
            if replica() == 2:
                raise FirstError
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            unwound.append(replica())
            raise

    with pytest.raises(FirstError):
        await mirrored(4).run(program)
    assert sorted(unwound) in ([0, 1], [0, 1, 3])


async def test_replica_that_has_not_begun_never_does() -> None:
    begun = []

    def program() -> None:
        begun.append(replica())
        raise FirstError

    with pytest.raises(FirstError):
        await mirrored(3).run(program)
    assert begun[0] == 0


async def test_several_of_one_type_give_the_lowest_id_and_notes() -> None:
    async def program() -> None:
        try:
            await here().barrier()
            if replica() == 1:
                raise FirstError("own of 1")
            await anyio.sleep_forever()
        finally:
            if replica() in (0, 2):
                raise FirstError(f"own of {replica()}")

    strategy = mirrored(3)
    with pytest.raises(FirstError, match="own of 0") as caught:
        await strategy.run(program)
    notes = caught.value.__notes__
    assert notes[0].startswith("replica 0 of 3 on CPU:0")
    assert notes[1:] == ["replica 1 failed, too: FirstError: own of 1", "replica 2 failed, too: FirstError: own of 2"]
    await still_works(strategy)


async def test_several_of_different_types_give_a_group() -> None:
    async def program() -> None:
        try:
            await here().barrier()
            if replica() == 1:
                raise FirstError
            await anyio.sleep_forever()
        finally:
            if replica() == 0:
                raise SecondError

    strategy = mirrored(3)
    with pytest.raises(ExceptionGroup, match="several replicas failed") as caught:
        await strategy.run(program)
    assert [type(error) for error in caught.value.exceptions] == [SecondError, FirstError]
    assert [error.__notes__[0].partition(";")[0] for error in caught.value.exceptions] == [
        "replica 0 of 3 on CPU:0",
        "replica 1 of 3 on CPU:1",
    ]
    await still_works(strategy)


async def test_one_object_raised_by_several_replicas_comes_out_once() -> None:
    error = FirstError()

    async def program() -> None:
        try:
            await here().barrier()
            if replica() == 0:
                raise error
            await anyio.sleep_forever()
        finally:
            raise error

    with pytest.raises(FirstError) as caught:
        await mirrored(3).run(program)
    assert caught.value is error
    assert len(error.__notes__) == 1


async def test_exception_group_of_a_replica_comes_out_as_itself() -> None:
    error = ExceptionGroup("mine", [FirstError(), SecondError()])

    async def program() -> None:
        if replica() == 1:
            raise error
        await here().barrier()

    with pytest.raises(ExceptionGroup) as caught:
        await mirrored(2).run(program)
    assert caught.value is error


async def test_exception_after_all_others_have_returned() -> None:
    async def program() -> None:
        await here().barrier()
        if replica() == 1:
            for _ in range(5):
                await checkpoint()
            raise FirstError

    with pytest.raises(FirstError):
        await mirrored(3).run(program)


async def test_collective_in_a_shielded_clean_up_does_not_hang() -> None:
    seen = []

    async def program() -> None:
        try:
            if replica() == 1:
                await checkpoint()
                raise FirstError
            await here().barrier()
        finally:
            if replica() == 0:
                with anyio.CancelScope(shield=True), pytest.raises(CollectiveError):
                    await here().barrier(name="clean-up")
                seen.append(replica())

    strategy = mirrored(2)
    with pytest.raises(FirstError):
        await strategy.run(program)
    assert seen == [0]
    await still_works(strategy)


async def test_replica_in_a_shielded_collective_does_not_hang_when_another_fails() -> None:
    failing = anyio.Event()
    seen: list[str] = []

    async def program() -> None:
        if replica() == 0:
            with anyio.CancelScope(shield=True):
                failing.set()
                with pytest.raises(CollectiveError) as caught:
                    await here().barrier()
                seen.append(caught.value.report.reason)
            await checkpoint()  # here the cancellation takes effect
            seen.append("went on")
        await failing.wait()
        raise FirstError

    strategy = mirrored(2)
    with pytest.raises(FirstError) as caught:
        await strategy.run(program)
    assert seen == ["exited"]
    assert caught.value.__notes__[0].startswith("replica 1 of 2")
    await still_works(strategy)


async def test_echo_of_a_failure_is_not_a_failure() -> None:
    """What a replica runs into after another's failure does not come out beside it."""

    async def program() -> None:
        if replica() == 1:
            raise FirstError
        with anyio.CancelScope(shield=True):
            await checkpoint()
            await here().barrier()

    with pytest.raises(FirstError) as caught:
        await mirrored(2).run(program)
    assert len(caught.value.__notes__) == 1


async def test_failure_while_unwinding_from_a_mismatch_stands_in_a_note() -> None:
    async def program() -> None:
        try:
            await (here().barrier() if replica() else here().all_reduce("SUM", 1))
        finally:
            if replica() == 1:
                raise SecondError("clean-up")

    with pytest.raises(CollectiveMismatchError) as caught:
        await mirrored(2).run(program)
    assert caught.value.__notes__ == ["while it unwound, replica 1 raised SecondError: clean-up"]


async def test_mismatch_that_came_out_of_a_task_group_is_no_failure_of_its_own() -> None:
    async def child() -> None:
        await (here().barrier() if replica() else here().all_reduce("SUM", 1))

    async def program() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)

    with pytest.raises(CollectiveMismatchError) as caught:
        await mirrored(2).run(program)
    assert not hasattr(caught.value, "__notes__")


async def test_mismatch_is_raised_in_every_replica_that_waits_also_in_the_one_that_differs() -> None:
    told = []

    async def program() -> None:
        try:
            await (here().barrier() if replica() else here().all_reduce("SUM", 1))
        except CollectiveMismatchError:
            told.append(replica())
            raise

    with pytest.raises(CollectiveMismatchError):
        await mirrored(4).run(program)
    assert sorted(told) == [0, 1, 2, 3]


async def test_mismatch_comes_out_even_where_every_replica_caught_it() -> None:
    async def program() -> str:
        try:
            await (here().barrier() if replica() else here().all_reduce("SUM", 1))
        except CollectiveMismatchError:
            return "caught"
        return "missed"

    strategy = mirrored(2)
    with pytest.raises(CollectiveMismatchError):
        await strategy.run(program)
    await still_works(strategy)


async def test_mismatch_is_caused_by_what_the_odd_replica_was_handling() -> None:
    error = FirstError("mine")

    async def program() -> None:
        try:
            if replica() == 1:
                raise error
            await here().all_reduce("SUM", 1)
        finally:
            await here().barrier()

    strategy = mirrored(3)
    with pytest.raises(CollectiveMismatchError) as caught:
        await strategy.run(program)
    assert caught.value.report.suspects == (1,)
    assert caught.value.__cause__ is error
    assert "replica 1 was handling FirstError: mine" in caught.value.__notes__
    await still_works(strategy)


async def test_what_the_others_were_handling_is_no_cause() -> None:
    async def program() -> None:
        try:
            error_out(FirstError)
        except FirstError:
            if replica() != 1:
                await here().all_reduce("SUM", 1)
        await here().barrier()

    with pytest.raises(CollectiveMismatchError) as caught:
        await mirrored(3).run(program)
    assert caught.value.__cause__ is None


async def test_replica_that_catches_the_verdict_for_ever_is_ended() -> None:
    async def program() -> None:
        while True:
            with contextlib.suppress(CollectiveError):
                await (here().barrier() if replica() else here().all_reduce("SUM", 1))

    strategy = mirrored(3)
    with pytest.raises(CollectiveMismatchError):
        await strategy.run(program)
    await still_works(strategy)


@pytest.mark.parametrize("times", [3])
async def test_strategy_after_many_failures(times: int) -> None:
    strategy = mirrored(3)

    async def program(which: int) -> Any:
        await here().barrier()
        if replica() == which:
            raise FirstError

    for which in range(times):
        with pytest.raises(FirstError):
            await strategy.run(program, args=(which,))
        await still_works(strategy)
