"""A tracer: what one trace has seen of runs, and the file that it is written to as they go on."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from threading import Lock

from aiodist.tools.tracing.events import EventWriter
from aiodist.tools.tracing.recording import Recording
from aiodist.tools.tracing.whole_file import WholeFile

FORMAT = 1
"""The version of what a trace file tells beyond the Trace Event format."""
KEPT_ARRIVALS = 1_000_000
"""So many arrivals are kept before they are written out, which takes some seconds."""


class Tracer:
    """A recording, and the file that it goes to.

    Args:
        path: the file.

    Raises:
        OSError: its folder does not exist or cannot be written to.
    """

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
