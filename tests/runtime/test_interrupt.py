"""Ctrl-C as a user presses it: a separate process, a real signal, and the text on the screen."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import asyncio, signal, sys, time
import anyio
from aiodist import MirroredStrategy, get_replica_context
from aiodist._runtime import run_threads

run_threads._PATIENCE_SECONDS = 0.1

def slow():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

async def steps(ctx):
    while True:
        await ctx.all_reduce("sum", 1.0)

async def in_a_thread(ctx):
    if ctx.replica_id_in_sync_group == 1:
        await ctx.run_sync(slow)
    await ctx.barrier()

async def another(ctx):
    if ctx.replica_id_in_sync_group == 0:
        try:
            await ctx.barrier()
        finally:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
    await in_a_thread(ctx)

async def saving(ctx):
    try:
        await steps(ctx)
    finally:
        await ctx.barrier()

async def child_tasks(ctx):
    async with anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(steps, ctx.new_group([0, 1, 2], name))

async def blocking(ctx):
    if ctx.replica_id_in_sync_group == 1:
        slow()
    await ctx.barrier()

async def replica(program):
    ctx = get_replica_context()
    if ctx.replica_id_in_sync_group == 0 and program in (saving, child_tasks):
        print("ready", flush=True)
    await program(ctx)

def main(program, loop):
    run = lambda: MirroredStrategy([f"CPU:{i}" for i in range(3)]).run(replica, (globals()[program],))
    if loop == "uvloop":
        import uvloop
        uvloop.run(run())
    else:
        anyio.run(run, backend=loop)

main(*sys.argv[1:])
"""


def _interrupted(program: str, loop: str, times: int = 1) -> str:
    """Return the standard error of a program that is ended by Ctrl-C."""
    pytest.importorskip(loop)
    command = [sys.executable, "-c", _PROGRAM, program, loop]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd())
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(times - 1):  # the earlier ones change nothing: it still runs
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    lines = errors.splitlines()
    assert "KeyboardInterrupt" in lines
    assert len(lines) < 60
    for word in ("never awaited", "destroyed", "never retrieved", "ExceptionGroup", "Exception Group"):
        assert word not in errors
    return errors


@pytest.mark.parametrize(
    ("program", "loop"), [("saving", "asyncio"), ("saving", "trio"), ("child_tasks", "uvloop"), ("child_tasks", "trio")]
)
def test_ctrl_c_ends_replicas_that_issue_only_collectives(program: str, loop: str) -> None:
    _interrupted(program, loop)


@pytest.mark.parametrize(
    ("program", "loop"), [("in_a_thread", "asyncio"), ("another", "asyncio"), ("in_a_thread", "trio")]
)
def test_ctrl_c_leaves_the_thread_of_run_sync_and_names_its_function(program: str, loop: str) -> None:
    assert _interrupted(program, loop).startswith(
        "aiodist: interrupted while run_sync still runs slow() of replica 1\n"
    )


@pytest.mark.parametrize(("loop", "times"), [("asyncio", 2), ("trio", 1)])
def test_ctrl_c_ends_a_replica_that_holds_up_the_loop(loop: str, times: int) -> None:
    errors = _interrupted("blocking", loop, times)
    assert "replica 1 of 3 on CPU:1" in errors
