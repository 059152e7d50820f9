"""What this worker tells `aiodist run`: it waits to meet the others, they have met, it ends, its error is an echo.

An engine that waits for a worker that has ended already does so in its own code, and tells nobody; MPI lets no worker
end before all do, who may wait to meet it. The launcher sees it by the notes that workers leave in its folder; they are
listed in `aiodist._tools.launch.notes`.

A worker that ends while it is needed makes the others fail, and they may be gone before it is. So each tells when its
error is an echo, and the job ends with the exit code of a worker whose own it was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from aiodist._arrays import environment
from aiodist._core.errors import IncompleteCollectiveError, WorkerLostError

ENDED: Final = "has ended"


@contextmanager
def told_to_the_launcher() -> Iterator[None]:
    """Tell of a rendezvous, and of its end: how often the workers have met is told when this one waits no more."""
    folder = environment.notes()
    if not folder:
        yield
        return
    from pathlib import Path  # only a launcher's workers need it

    rendezvous, met = (Path(folder, f"{kind}.{os.getpid()}") for kind in ("rendezvous", "met"))
    with suppress(OSError):
        rendezvous.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            rendezvous.unlink()
    with suppress(OSError):
        met.write_text(str(int(met.read_text()) + 1 if met.exists() else 1))


def tell_of_leaving() -> None:
    """Tell that this worker is ready to end, and waits for the others."""
    _tell("leaving")


def tell_of_echo() -> None:
    """Tell that this worker fails because another has."""
    _tell("echo")


def tell_of_memory() -> None:
    """Tell what memory this worker shares with others, which it leaves behind."""
    if not has_a_launcher():
        return
    from pathlib import Path

    with suppress(OSError):  # only Linux shows it
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines(keepends=True)
        _tell("memory", "".join(line for line in lines if "/dev/shm/" in line))  # noqa: S108


def _tell(kind: str, text: str = "") -> None:
    if folder := environment.notes():
        from pathlib import Path

        with suppress(OSError):
            Path(folder, f"{kind}.{os.getpid()}").write_text(text, encoding="utf-8")


def has_a_launcher() -> bool:
    """Return whether the launcher keeps notes on this machine."""
    return os.path.isdir(environment.notes() or "")  # noqa: PTH112  (without pathlib, which takes time to import)


def another_has_failed() -> bool:
    """Return whether an agent of this machine has noted that its worker has failed."""
    from pathlib import Path

    with suppress(OSError):
        return any(note.read_text() not in {"", "0"} for note in Path(environment.notes() or ".").glob("ended.*"))
    return False


def last_error() -> BaseException | None:
    """Return the error that ends the program; None where none has been shown, as of one that calls `sys.exit`."""
    return getattr(sys, "last_value", None)


def farewell_of(error: BaseException | None) -> str:
    """Return what the others are told of this worker, whose program ends with that error."""
    return ENDED if error is None else f"{ENDED}: {type(error).__name__}: {error}".partition("\n")[0]


def is_echo(error: BaseException | None, own: Collection[int]) -> bool:
    """Return whether an error says that replicas of other workers have ended, and none of this one's."""
    if not isinstance(error, (WorkerLostError, IncompleteCollectiveError)):
        return False
    ended = [replica.replica_id for replica in error.report.replicas if replica.state.ended]
    return bool(ended) and not any(replica_id in own for replica_id in ended)
