"""Findings: what an analysis has found, before it is put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiodist._core.call import Post
from aiodist._core.divergence import Side
from aiodist._core.report import Divergence, Location, Reason, ReplicaReport
from aiodist._core.snapshot import GroupRecord


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found.

    Attributes:
        reason, sequence_number, replicas: as in `CollectiveReport`.
        odd: ids of the minority, which is marked; empty on a tie.
        partitions: who arrived, by equal calls, the largest partition first, with the post of its first replica.
        chains: of each partition, its callers' places from the first one that differs between them down to its call.
        abandoned: ids of those that were cancelled out of the collective.
        elsewhere: by id, for those that wait in a collective of another group, in which, and where they called it.
        refusals: by id, for those of them that were not cancelled, but whose call was refused, what that has raised.
        group: what the group is called; None for the run's own.
        joining: the collective is a join.
        sides: one of the majority and one of the odd ones, to be laid beside each other; None where there are none.
        divergence: how they diverged, where that is known.
        cancellations: sentences about those that were cancelled out of it: of which call, and why.
        circle: a sentence about tasks that wait for each other; empty where there are none.
        unknown: ids of those of which nothing is known.
        races: sentences about replicas that issue collectives in several tasks at once.
        timeout_seconds: how long the collective had, from the first arrival; 0 where there was no limit.
    """

    reason: Reason
    sequence_number: int
    replicas: tuple[ReplicaReport, ...]
    odd: tuple[int, ...]
    partitions: Sequence[tuple[Sequence[int], Post]]
    chains: Sequence[tuple[Location, ...]]
    abandoned: tuple[int, ...]
    elsewhere: Mapping[int, tuple[str, Location]]
    refusals: Mapping[int, str]
    group: str | None
    joining: bool
    sides: tuple[Side, Side] | None
    divergence: Divergence | None
    cancellations: tuple[str, ...]
    circle: str
    unknown: frozenset[int]
    races: tuple[str, ...]
    timeout_seconds: float


class Step(NamedTuple):
    """Replicas of a cycle that wait in one collective for others of the cycle.

    Attributes:
        replicas: their ids.
        post: what they wait in.
        joining: that is a join.
        number: its sequence number.
        group: the group that it is of.
        missing: for whom they wait.
        odd: they are the minority.
    """

    replicas: tuple[int, ...]
    post: Post
    joining: bool
    number: int
    group: GroupRecord
    missing: tuple[int, ...]
    odd: bool
