"""A program that ends in one way or another, for jobs of `aiodist run`; it needs no workers, so that it starts quickly.

Every worker prints its process and its agent's first. The word says what it does then.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time


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
    if what == "one has no strategy":
        if first(arguments[0]):
            return
        importlib.import_module("aiodist").MultiWorkerMirroredStrategy()
    time.sleep(60)


def wait_for_end_and_say_so() -> None:
    """Tidy up when the end is asked for, as a program does that saves what it has."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("tidied up"))
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit("tidied up")


def first(path: str) -> bool:
    """Return whether this is the first worker to get here."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
