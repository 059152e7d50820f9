"""Findings: what a verdict has found, before it is put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiodist._core.report import Divergence, Reason, ReplicaReport
from aiodist._runtime.waits import Look
from aiodist.collective.parting import Side
from aiodist.collective.signature import Signature


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found, before it is put into words.

    Attributes:
        reason, sequence_number, replicas, suspects: as in `CollectiveReport`.
        camps: who arrived, by equal calls, the largest camp first.
        columns: where on its line each camp's call begins, counted from 0; None where Python does not know.
        abandoned: ids of those that were cancelled out of the collective.
        refusals: by id, for those of them that were not cancelled, but whose call was refused, what that has raised.
        let_go: ids of those that are not there, and have let the group go.
        group: what the group is called; None for the run's own.
        joining: the collective is a join.
        sides: one of the majority and one of the odd ones, to be laid beside each other; None where there are none.
        divergence: how they parted, where that is known.
        time_limits: for those that were cancelled out of it, the timeout or cancel scope that they were inside of.
        look: what a look at the replicas' tasks has found.
        timeout_seconds: how long the collective had, from the first arrival; 0 where there was no limit.
    """

    reason: Reason
    sequence_number: int
    replicas: tuple[ReplicaReport, ...]
    suspects: tuple[int, ...]
    camps: Sequence[tuple[Sequence[int], Signature]]
    columns: Sequence[int | None]
    abandoned: tuple[int, ...]
    refusals: Mapping[int, str]
    let_go: tuple[int, ...]
    group: str | None
    joining: bool
    sides: tuple[Side, Side] | None
    divergence: Divergence | None
    time_limits: tuple[str, ...]
    look: Look
    timeout_seconds: float

    @property
    def marked(self) -> set[int]:
        """Who is marked as odd: the suspects, unless that is everyone."""
        return set(self.suspects) if len(self.suspects) < len(self.replicas) else set()


def calls_made(replica: ReplicaReport) -> int:
    """Return how many collectives a replica has issued."""
    return replica.history[-1].sequence_number + 1 if replica.history else 0
