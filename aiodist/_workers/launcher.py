"""What this worker tells `aiodist run`: it waits to meet the others, they have met, it ends, its error is an echo.

An engine that waits for a worker that has ended already does so in its own code, and tells nobody; MPI lets no worker
end before all do, who may wait to meet it. The launcher sees it by the notes that workers leave in its folder; they are
listed in `aiodist._tools.launch.notes`.

A worker that ends while it is needed makes the others fail, and they may be gone before it is. So each tells when its
error is an echo, and the job ends with the exit code of a worker whose own it was.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final

from aiodist._arrays import environment
from aiodist._core.errors import CollectiveError, IncompleteCollectiveError, WorkerLostError
from aiodist._core.report import CollectiveReport

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


def missing_workers() -> str:
    """Return which workers have not come to a rendezvous, as far as `aiodist run` knows, for the end of a sentence."""
    folder = environment.notes()
    if not folder:
        return ""
    from pathlib import Path

    missing = []
    for note in Path(folder).glob("started.*"):
        with suppress(OSError, ValueError):
            if not note.with_name(f"rendezvous{note.suffix}").exists():
                missing.append((int(note.read_text().split()[1]), note.suffix[1:]))
    who = ", ".join(f"worker {rank} (process {pid} on {platform.node()})" for rank, pid in sorted(missing))
    return f"; {who} has not come" if who else ""


def shorten_reports(rank: int) -> None:
    """Show a report that all workers raise as one line, where a program of a worker behind the first ends by it."""
    show = sys.excepthook

    def show_shortly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inner = error
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        if isinstance(inner, CollectiveError) and any(inner.report is report for report in reports_of_all):
            first = str(inner).partition("\n")[0]
            shown = f"{type(inner).__name__}: {first} (worker {rank}; the first worker shows the report)"
            print(shown, file=sys.stderr)  # noqa: T201  (as the interpreter shows errors)
        else:
            show(kind, error, trace)

    if rank > 0 and not _shortens:
        _shortens.append(rank)
        sys.excepthook = show_shortly


reports_of_all: Final[list[CollectiveReport]] = []
"""The reports that all workers have been given."""

_shortens: Final[list[int]] = []


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
