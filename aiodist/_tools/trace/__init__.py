"""Traces: the timeline of runs, in a file and on a page. Each module imports only earlier ones.

- `recording`: the timeline, and the observer that records it.
- `file`: trace files, written and read back.
- `show`: the `trace` command: statistics in the terminal, and a page for a browser.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from aiodist._arrays import environment
from aiodist._core.instrument import Observer, observe_process, observing

if TYPE_CHECKING:
    from pathlib import Path


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write the timeline of all runs that begin inside the block to a file, for Perfetto, Chrome and ``aiodist trace``.

    The block may enclose ``asyncio.run`` or ``trio.run``, any number of runs, or a part of a coroutine. It records the
    runs of its own task or thread and of tasks started there. The file is written when the block ends, even by an
    exception, and is complete or absent. Read it with ``aiodist trace show`` and ``aiodist trace html``, or open it in
    https://ui.perfetto.dev. The environment variable ``AIODIST_TRACE`` with a path does the same for every run of a
    process. With several workers, a trace has the replicas of its own process.

    Args:
        path: the file, usually ``….json``; an existing file is replaced.

    Yields:
        The path.

    Raises:
        OSError: the folder does not exist or cannot be written to, or the file cannot be written at the end.
    """
    from pathlib import Path

    recording, end = _begin(path)
    try:
        with observing(recording):
            yield Path(path)
    finally:
        end()


def _begin(path: str | os.PathLike[str]) -> tuple[Observer, Callable[[], None]]:
    """Return the observer of a trace, and the function that writes the file at the end."""
    from aiodist._tools.trace.file import check_path, write_trace  # here, since every program imports this module
    from aiodist._tools.trace.recording import Recording

    place, recording = check_path(path), Recording()

    def end() -> None:
        recording.close()
        write_trace(recording, place)

    return recording, end


@cache
def _of_process() -> Observer | None:
    """Begin the trace that ``AIODIST_TRACE`` requests, if any, at the process's first run."""
    path = environment.trace_path()
    if path is None:
        return None
    recording, end = _begin(path)
    atexit.register(end)
    return recording


observe_process(_of_process)
