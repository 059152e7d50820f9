"""`aiodist demo mismatch`: what a person sees when one replica takes another branch."""

from __future__ import annotations

import inspect

import aiodist
from aiodist.demos import interruption
from aiodist.demos.branching import learn, learn_together
from aiodist.demos.console import open_console

DEVICES = ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
LIMIT = 0.2

BEFORE = """\
Four replicas run this function. Its branch hangs on data that each replica has for itself:
"""
NOW = """
Somewhere else the third replica's barrier meets the others' sum, or all of them hang. aiodist says:
"""
AFTER = """
learn_together, below it in the same file, reduces the condition first: it ends, with {guess:.2f}, on the very strategy
that has just failed. Showing the error is what this demo is for, so the exit code is 0.\
"""


def run_mismatch() -> bool:
    """Run a wrong program, then the right one, and print both ends; return whether they were as they should be."""
    console = open_console()
    strategy = aiodist.MirroredStrategy(DEVICES)
    console.print(f"{BEFORE}\n{numbered_source()}\n{NOW}", soft_wrap=True)
    error = interruption.run(_error_of, strategy)
    if error is None:
        console.print("Nothing: the mismatch was not found. That is a bug.")
        return False
    console.print(f"{type(error).__name__}: {error}", soft_wrap=True)
    console.print(AFTER.format(guess=interruption.run(_corrected, strategy)), soft_wrap=True)
    return True


def numbered_source() -> str:
    """Return the wrong program with the line numbers that the report will name."""
    lines, first = inspect.getsourcelines(learn)
    return "".join(f"{number:4d}  {line}" for number, line in enumerate(lines, first)).rstrip()


async def _error_of(strategy: aiodist.Strategy) -> aiodist.CollectiveMismatchError | None:
    try:
        await strategy.run(learn, (LIMIT,))
    except aiodist.CollectiveMismatchError as error:
        return error
    return None


async def _corrected(strategy: aiodist.Strategy) -> float:
    guesses = strategy.experimental_local_results(await strategy.run(learn_together, (LIMIT,)))
    return float(guesses[0])
