"""The errors for workers that are gone, or cannot reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from aiodist._core.errors import WorkerLostError
from aiodist._core.report import CollectiveReport, Reason, ReplicaReport, ReplicaState
from aiodist.collective.wording import ids
from aiodist.workers.layout import Layout


def lost_worker(layout: Layout, rank: int, why: str) -> WorkerLostError:
    """Return the error for a worker that is gone."""
    gone = _replicas_of(layout, rank)
    return _error(layout, gone, f"worker {rank} of {layout.workers} {why}; it had {ids(gone)}")


def cut_link(layout: Layout, one: int, other: int) -> WorkerLostError:
    """Return the error for two workers that do not reach each other, while others reach both."""
    gone = [*_replicas_of(layout, one), *_replicas_of(layout, other)]
    text = (
        f"workers {one} and {other} of {layout.workers} are cut off from each other, though the first worker reaches "
        f"both; they had {ids(gone)}"
    )
    return _error(layout, gone, text)


def _replicas_of(layout: Layout, rank: int) -> Sequence[int]:
    return layout.places[rank]


def _error(layout: Layout, gone: Sequence[int], text: str) -> WorkerLostError:
    return WorkerLostError(_report(layout.names, tuple(gone), text))


@lru_cache(maxsize=1)  # simulated workers, of which there may be thousands in one process, share it
def _report(names: tuple[str, ...], gone: tuple[int, ...], text: str) -> CollectiveReport:
    lost = set(gone)
    states = [ReplicaState.FAILED if i in lost else ReplicaState.RUNNING for i in range(len(names))]
    replicas = tuple(map(ReplicaReport, range(len(names)), names, states))
    return CollectiveReport(Reason.WORKER_LOST, 0, replicas, gone, text)
