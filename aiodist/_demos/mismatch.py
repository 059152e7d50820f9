"""`aiodist demo mismatch`: the report on a program in which one replica takes another branch."""

from __future__ import annotations

import asyncio
import inspect

import numpy as np

import aiodist
from aiodist._tools.output import open_console, print_report

SAMPLES = (3.0, 5.0, 2.7, 4.0)

BEFORE = """\
Four replicas run this function, in which a branch depends on the replica's own data:
"""
NOW = """
Other libraries combine the third replica's barrier with the others' all_reduce, or hang. aiodist reports:
"""
AFTER = "\nThis error is the purpose of the demo, so the exit code is 0."


async def learn(limit: float = 0.2) -> float:
    """Return a guess near the samples' mean. This program is wrong on purpose."""
    ctx = aiodist.get_replica_context()
    sample = SAMPLES[ctx.replica_id_in_sync_group]
    guess = np.zeros(1)
    for _ in range(20):
        error = sample - guess
        if abs(error[0]) < limit:  # its own error, which differs from the others'
            await ctx.barrier()
            break
        guess = guess + 0.5 * await ctx.all_reduce(aiodist.ReduceOp.MEAN, error)
    return float(guess[0])


def run_mismatch() -> bool:
    """Run a faulty program and print the report on it; return whether there was one."""
    console = open_console()
    lines, first = inspect.getsourcelines(learn)
    source = "".join(f"{number:4d}  {line}" for number, line in enumerate(lines, first)).rstrip()
    console.print(f"{BEFORE}\n{source}\n{NOW}", soft_wrap=True)
    try:
        asyncio.run(aiodist.MirroredStrategy(len(SAMPLES)).run(learn))
    except aiodist.CollectiveMismatchError as error:
        print_report(console, f"{type(error).__name__}: {error}")
        console.print(AFTER, soft_wrap=True)
        return True
    console.print("Nothing: the mismatch was not found. That is a bug.")
    return False
