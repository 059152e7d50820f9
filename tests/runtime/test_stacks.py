"""Chains of awaits, seen from outside and from inside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import pytest

from aiodist._runtime.stacks import awaited_by, links


class Step:
    """An awaitable whose one step calls a function."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Step:
        return self

    def __next__(self) -> None:
        self._look()
        raise StopIteration


def run(coroutine: Any) -> None:
    with pytest.raises(StopIteration):
        coroutine.send(None)


def test_running_coroutine_awaits_nothing() -> None:
    # what Python 3.12 says of one depends on a counter: it is wrong at one of some hundred steps, and crashes
    async def nothing() -> None:
        pass

    async def steps() -> None:
        for number in range(5000):
            step: Awaitable[None] = Step(look) if number % 7 else nothing()
            await step

    def look() -> None:
        found.append(awaited_by(coroutine))

    found: list[Any] = []
    coroutine: Any = steps()
    run(coroutine)
    assert set(found) == {None}


def test_step_of_an_async_generator_is_followed_where_it_waits_and_ends_where_it_runs() -> None:
    class Pause:
        def __await__(self) -> Generator[None]:
            yield

    seen: dict[str, list[tuple[str, bool]]] = {}

    def look(when: str, start: Any) -> None:
        seen[when] = [(link.frame.f_code.co_name, link.running) for link in links(start) if link.frame is not None]

    async def numbers() -> AsyncIterator[int]:
        look("it runs", generator)
        await pause()
        yield 1

    async def consume() -> None:
        async for _ in generator:
            pass

    async def pause() -> None:
        await Pause()

    generator = numbers()
    coroutine: Any = consume()
    coroutine.send(None)
    look("it waits", coroutine)
    run(coroutine)
    assert seen["it runs"] == [("numbers", True)]
    assert seen["it waits"][:3] == [("consume", False), ("numbers", False), ("pause", False)]
    assert not any(running for _, running in seen["it waits"])
