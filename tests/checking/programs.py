"""What tests of checking share: a way to run a program once on a controlled loop, and strategies of n replicas."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from aiodist import MirroredStrategy
from aiodist.checking.runs import Ended, coroutine_program, run
from aiodist.checking.schedule import ASIDE, Change, Order, Replayed

Main = Callable[[], Coroutine[Any, Any, Any]]


def mirrored(replicas: int) -> MirroredStrategy:
    return MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def ended(main: Main, *changes: tuple[int, int], seconds: float | None = 20, seed: int = 0) -> Ended:
    """Run a main coroutine function once, in plain order but for the changes."""
    order = Replayed([Change(*change) for change in changes]) if changes else Order()
    return run(coroutine_program(main), order, seed=seed, seconds=seconds)


def value(main: Main, *changes: tuple[int, int], seed: int = 0) -> Any:
    """Return what a main coroutine function returns."""
    how = ended(main, *changes, seed=seed)
    if how.error is not None:
        raise how.error
    return how.value


def letters(replicas: int, turns: int = 2) -> Main:
    """Return a program of plain tasks, each of which writes its number once a turn; its value is what was written."""
    import asyncio

    async def main() -> str:
        written: list[str] = []

        async def task(number: int) -> None:
            for _ in range(turns):
                written.append(str(number))
                await asyncio.sleep(0)

        await asyncio.gather(*(task(number) for number in range(replicas)))
        return "".join(written)

    return main


__all__ = ["ASIDE", "ended", "letters", "mirrored", "value"]
