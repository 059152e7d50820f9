"""`aiodist.trace`, and ``AIODIST_TRACE``: the timeline of runs, written to a file as they end."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from threading import Lock

from aiodist.collective.observer import Observer, observe_process, observing
from aiodist.tools.tracing.events import EventWriter
from aiodist.tools.tracing.recording import Recording
from aiodist.tools.tracing.whole_file import WholeFile
from aiodist.vocabulary import environment

FORMAT = 1
"""The version of what a trace file tells beyond the Trace Event format."""
KEPT_ARRIVALS = 1_000_000
"""So many arrivals are kept before they are written out, which takes some seconds."""


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write the whole timeline of the runs that begin inside the block to a file, for Perfetto, Chrome and `aiodist`.

    It can stand around ``asyncio.run`` or ``trio.run``, around any number of runs, and in a coroutine. It sees the
    runs of its own task or thread and of tasks that those start; other runs beside it may have traces of their own.
    The file appears, complete, when the block ends, also by an exception; or not at all. Read it with
    ``aiodist trace show`` and ``aiodist trace html``, or open it in https://ui.perfetto.dev. Setting the environment
    variable ``AIODIST_TRACE`` to a path does the same for every run of a process.

    Args:
        path: the file, by habit ``….json``. What stands there is replaced.

    Yields:
        The path.

    Raises:
        OSError: the folder does not exist or cannot be written to, or the file cannot be written at the end.
    """
    tracer = _Tracer(path)
    try:
        with observing(tracer.recording):
            yield Path(path)
    except BaseException as error:
        try:
            tracer.close()
        except OSError as problem:
            error.add_note(f"its trace was not written: {problem}")
        raise
    else:
        tracer.close()


class _Tracer:
    """A recording, and the file that it goes to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.recording = Recording(self._fuller)
        self._file = WholeFile(path)
        self._events = EventWriter()
        self._lock = Lock()
        self._problem: OSError | None = None
        self._separator = "\n"
        about = {
            "aiodist_trace": FORMAT,
            "began": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "python": sys.version.partition(" ")[0],
            "command": " ".join(sys.argv),
        }
        self._file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[')
        self._file.flush()  # or a fork of the process would write it once more

    def _fuller(self) -> None:
        if self.recording.arrivals >= KEPT_ARRIVALS and self._problem is None:
            try:
                self._write_out()
            except OSError as problem:  # told when the trace ends: the run is not to blame
                self._problem = problem

    def _write_out(self) -> None:
        with self._lock:
            for line in self._events.lines(self.recording.take()):
                self._file.write(self._separator)
                self._file.write(line)
                self._separator = ",\n"
            self._file.flush()

    def close(self) -> None:
        """Write what is left, and put the file in its place."""
        self.recording.close()
        if self._problem is not None:
            self._file.discard()
            raise self._problem
        try:
            self._write_out()
            self._file.write("\n]}\n")
        except BaseException:
            self._file.discard()
            raise
        self._file.keep()


@cache
def _of_process() -> Observer | None:
    """Begin the trace that ``AIODIST_TRACE`` asks for, if it does, at the process's first run."""
    path = environment.trace_path()
    if path is None:
        return None
    try:
        tracer = _Tracer(path)
    except OSError as problem:
        raise type(problem)(problem.errno, f"AIODIST_TRACE: {problem.strerror}") from None
    atexit.register(_close, tracer, path, os.getpid())
    return tracer.recording


def _close(tracer: _Tracer, path: str, process: int) -> None:
    if os.getpid() != process:  # a fork's end is not the end
        return
    try:
        tracer.close()
    except OSError as problem:
        print(f"AIODIST_TRACE={path}: {problem}", file=sys.stderr)


observe_process(_of_process)
