"""`aiodist.trace`, and ``AIODIST_TRACE``: the timeline of runs, written to a file as they end."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from aiodist._arrays import environment
from aiodist._core.instrument import Observer, observe_process, observing

if TYPE_CHECKING:
    from pathlib import Path

    from aiodist._tools.trace.writer import Tracer


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write the timeline of all runs that begin inside the block to a file, for Perfetto, Chrome and ``aiodist trace``.

    The block may enclose ``asyncio.run`` or ``trio.run``, any number of runs, or a part of a coroutine. It records the
    runs of its own task or thread and of tasks started there; concurrent runs may have traces of their own. The file
    appears when the block ends, also by an exception, and is complete; if it cannot be written, there is none. Read it
    with ``aiodist trace show`` and ``aiodist trace html``, or open it in https://ui.perfetto.dev. The environment
    variable ``AIODIST_TRACE`` with a path does the same for every run of a process. Over several workers a trace has
    the replicas of its own process.

    Args:
        path: the file, usually ``….json``; an existing file is replaced.

    Yields:
        The path.

    Raises:
        OSError: the folder does not exist or cannot be written to, or the file cannot be written at the end.
    """
    from pathlib import Path

    from aiodist._tools.trace.writer import Tracer  # few programs trace, and all of them import this

    tracer = Tracer(path)
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


@cache
def _of_process() -> Observer | None:
    """Begin the trace for which ``AIODIST_TRACE`` asks, if it does, at the process's first run."""
    path = environment.trace_path()
    if path is None:
        return None
    from aiodist._tools.trace.writer import Tracer

    try:
        tracer = Tracer(path)
    except OSError as problem:
        raise type(problem)(problem.errno, f"AIODIST_TRACE: {problem.strerror}") from None
    atexit.register(_close, tracer, path, os.getpid())
    return tracer.recording


def _close(tracer: Tracer, path: str, process: int) -> None:
    if os.getpid() != process:  # the end of a fork is not the end of the process
        return
    try:
        tracer.close()
    except OSError as problem:
        print(f"AIODIST_TRACE={path}: {problem}", file=sys.stderr)


observe_process(_of_process)
