"""A program for jobs of `aiodist run` that ends in various ways: python endings.py NAME ARGUMENT...

Every worker first prints its process id and its agent's, then calls the function of that name.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def ends(code: str, *_: str) -> None:
    print("no newline", end="")
    sys.exit(int(code))


def one_ends(code: str, path: str) -> None:
    if first(path):
        sys.exit(int(code))
    time.sleep(60)


def one_raises_while_another_spins(path: str) -> None:
    mpi = importlib.import_module("mpi4py.MPI")  # which finalises MPI when Python has ended
    importlib.import_module("aiodist")
    if first(path):
        raise ValueError("bad batch")
    request = mpi.COMM_WORLD.Irecv(bytearray(1), mpi.ANY_SOURCE)
    while not request.Test():
        pass


def leaves_a_process(code: str) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    sys.exit(int(code))


def is_stubborn() -> None:
    while True:
        time.sleep(60)


def tidies_up() -> None:
    time.sleep(60)


HANDLERS: dict[str, Callable[[int, object], object]] = {
    "is_stubborn": lambda number, _: number == signal.SIGINT and print("no end", flush=True),
    "tidies_up": lambda *_: sys.exit("tidied up"),
}


def has_memory() -> None:
    importlib.import_module("aiodist").MultiWorkerMirroredStrategy()
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}):
        print(f"memory {path}")
    print("all printed")  # which several workers do not buffer, although they write to pipes
    time.sleep(60)


def first(path: str) -> bool:
    """Return whether this is the first worker to get here."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT) if name in HANDLERS else ():  # before the line that tests await
        signal.signal(number, HANDLERS[name])
    print(f"worker {os.getpid()} of agent {os.getppid()} {tuple(arguments)}", flush=True)
    globals()[name](*arguments)
