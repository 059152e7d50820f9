"""Recordings of collectives: which were made, in order, to compare with others or with a list."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from aiodist._core.instrument import Observer, observing
from aiodist._core.ledger import Slot
from aiodist._core.report import CallRecord
from aiodist._core.text import count, shown


class Recording:
    """The collectives that were completed, in order, of the runs that began while it was made.

    It is a sequence of `CallRecord`: each says what was called and where, at the call site of the replica that called
    first.
    """

    def __init__(self) -> None:
        self._records: list[CallRecord] = []

    def add(self, record: CallRecord) -> None:
        """Add a call."""
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[CallRecord]:
        return iter(self._records)

    def __getitem__(self, index: int) -> CallRecord:
        return self._records[index]

    def __repr__(self) -> str:
        return "\n".join(f"#{r.sequence_number} {r.call} at {shown(r.location)}" for r in self._records)

    @property
    def calls(self) -> list[str]:
        """The calls as text, e.g. ``all_reduce(SUM, float32[3])``."""
        return [record.call for record in self._records]


class _Recorder(Observer):
    """The observer that fills a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def completed(self, slot: Slot) -> None:
        """Record a collective that has its result."""
        if slot.error is None and slot.number >= 0:
            first = slot.first
            self._recording.add(CallRecord(slot.number, str(first.call), first.location))


@contextmanager
def record_collectives() -> Iterator[Recording]:
    """Record the collectives of the runs that begin inside the block, on any event loop.

    Yields:
        The recording, which grows while the block runs.
    """
    recording = Recording()
    with observing(_Recorder(recording)):
        yield recording


def assert_same_collectives(
    actual: Recording | Iterable[CallRecord | str], expected: Recording | Iterable[CallRecord | str]
) -> None:
    """Check that two programs made the same collectives in the same order; call sites are not compared.

    Args:
        actual: a recording, its records, or texts as in `Recording.calls`.
        expected: the same.

    Raises:
        AssertionError: they differ; the message is a diff.
    """
    left, right = _texts(expected), _texts(actual)
    if left == right:
        return
    diff = list(difflib.unified_diff(left, right, "expected", "actual", lineterm="", n=2))
    found = count(len(right), "call")
    raise AssertionError("\n".join([f"the collectives differ: {found}, expected {len(left)}", *diff]))


def _texts(calls: Iterable[CallRecord | str]) -> list[str]:
    return [call if isinstance(call, str) else call.call for call in calls]
