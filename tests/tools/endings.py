"""A program that ends in one way or another, for jobs of `aiodist run`; it needs no workers, so that it starts quickly.

Every worker prints its process and its agent's first. The word says what it does then.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def main(what: str, *arguments: str) -> None:
    """Do what the word says."""
    sys.stdout.write(f"worker {os.getpid()} of agent {os.getppid()} {arguments}\n")
    sys.stdout.flush()
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: os.write(1, b"no end\n") and None)
    if what == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    if what == "orderly":
        wait_for_end_and_say_so()
    if what == "flood":
        while True:
            sys.stdout.write("x" * 1000 + "\n")
    if what in {"exit", "child"}:
        sys.exit(int(arguments[0]))
    if what == "one exits" and first(arguments[1]):
        sys.exit(int(arguments[0]))
    if what in WITH_STRATEGY:
        WITH_STRATEGY[what](*arguments)
    else:
        time.sleep(60)


def wait_for_end_and_say_so() -> None:
    """Tidy up when the end is asked for, as a program does that saves what it has."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("tidied up"))
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit("tidied up")


def one_has_no_strategy(path: str) -> None:
    """Make a strategy, unless this is the first worker to get here."""
    if not first(path):
        importlib.import_module("aiodist").MultiWorkerMirroredStrategy()


def one_has_no_second_strategy(path: str) -> None:
    """Make a strategy and close it; make another, unless this is the first worker to get here."""
    make = importlib.import_module("aiodist").MultiWorkerMirroredStrategy
    make().close()
    if not first(path):
        make()


def has_memory() -> None:
    """Print which shared memory MPI has made, and stay."""
    importlib.import_module("aiodist").MultiWorkerMirroredStrategy()
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}):
        sys.stdout.write(f"memory {path}\n")
    sys.stdout.write("all told\n")
    sys.stdout.flush()
    time.sleep(60)


def has_children() -> None:
    """Fork a child that ends as programs do, start one that would be a worker, and be a worker meanwhile."""
    aiodist = importlib.import_module("aiodist")
    strategy = aiodist.MultiWorkerMirroredStrategy()
    if strategy.cluster_resolver.task_id:
        assert sys.stdin.read() == ""
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    child = "import aiodist; aiodist.MultiWorkerMirroredStrategy()"
    told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=False)
    sys.stdout.write(f"child: {told.stderr.splitlines()[-1]}\n")
    sys.stdout.flush()

    async def meet() -> None:
        await aiodist.get_replica_context().barrier()

    asyncio.run(strategy.run(meet))


def first(path: str) -> bool:
    """Return whether this is the first worker to get here."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


WITH_STRATEGY: dict[str, Callable[..., None]] = {
    "one has no strategy": one_has_no_strategy,
    "one has no second strategy": one_has_no_second_strategy,
    "has memory": has_memory,
    "has children": has_children,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
