"""`aiodist demo mismatch`: what a person sees when one replica takes another branch."""

from __future__ import annotations

import inspect

import numpy as np

import aiodist
from aiodist._demos import interruption
from aiodist._tools.output import open_console, print_report

SAMPLES = (3.0, 5.0, 2.7, 4.0)
DEVICES = ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
LIMIT = 0.2

BEFORE = """\
Four replicas run this function, whose branch depends on data that each replica has for itself:
"""
NOW = """
Elsewhere the third replica's barrier is matched with the others' sum, or all of them hang. aiodist says:
"""
AFTER = """
learn_together, below it in the same file, reduces the condition first: it ends, with {guess:.2f}, on the very strategy
that has just failed. Showing the error is what this demo is for, so the exit code is 0.\
"""


async def learn(limit: float) -> float:
    """Return a guess near the samples' mean. This program is wrong, on purpose."""
    ctx = aiodist.get_replica_context()
    sample = SAMPLES[ctx.replica_id_in_sync_group]
    guess = np.zeros(1)
    for _ in range(20):
        error = sample - guess
        if abs(error[0]) < limit:  # its own error: the other replicas have others
            await ctx.barrier()
            break
        guess = guess + 0.5 * await ctx.all_reduce(aiodist.ReduceOp.MEAN, error)
    return float(guess[0])


async def learn_together(limit: float) -> float:
    """Return the same guess. The condition is reduced first, so that all replicas take the same branch."""
    ctx = aiodist.get_replica_context()
    sample = SAMPLES[ctx.replica_id_in_sync_group]
    guess = np.zeros(1)
    for _ in range(20):
        error = await ctx.all_reduce(aiodist.ReduceOp.MEAN, sample - guess)
        if abs(error[0]) < limit:
            await ctx.barrier()
            break
        guess = guess + 0.5 * error
    return float(guess[0])


def run_mismatch() -> bool:
    """Run a wrong program, then the right one, and print both outcomes; return whether they were as they should be."""
    console = open_console()
    strategy = aiodist.MirroredStrategy(DEVICES)
    lines, first = inspect.getsourcelines(learn)
    source = "".join(f"{number:4d}  {line}" for number, line in enumerate(lines, first)).rstrip()
    console.print(f"{BEFORE}\n{source}\n{NOW}", soft_wrap=True)
    error = interruption.run(_error_of, strategy)
    if error is None:
        console.print("Nothing: the mismatch was not found. That is a bug.")
        return False
    print_report(console, f"{type(error).__name__}: {error}")
    console.print(AFTER.format(guess=interruption.run(_corrected, strategy)), soft_wrap=True)
    return True


async def _error_of(strategy: aiodist.Strategy) -> aiodist.CollectiveMismatchError | None:
    try:
        await strategy.run(learn, (LIMIT,))
    except aiodist.CollectiveMismatchError as error:
        return error
    return None


async def _corrected(strategy: aiodist.Strategy) -> float:
    guesses = strategy.experimental_local_results(await strategy.run(learn_together, (LIMIT,)))
    return float(guesses[0])
