"""Reports: the structured description of a disagreement between replicas.

A report is a value. It is complete when it is made, holds no reference to tasks, frames or arrays, and can be
pickled, compared and kept. `str(report)` is the text for a person.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Location(NamedTuple):
    """A place in a program.

    Attributes:
        file: the file's name as Python knows it.
        line: the line, counted from 1.
        function: the name of the function that the line belongs to.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class CallRecord(NamedTuple):
    """One collective in a replica's history.

    Attributes:
        sequence_number: its 0-based position in the replica's program.
        call: what was asked, as text, e.g. ``all_reduce(SUM, float32[3])``.
        location: where it was called.
    """

    sequence_number: int
    call: str
    location: Location


class ReplicaState(enum.StrEnum):
    """What a replica was doing when a report was written. Members compare equal to their lower-case names."""

    WAITING = "waiting"
    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the replica's function is over."""
        return self not in (ReplicaState.WAITING, ReplicaState.RUNNING)


class Reason(enum.StrEnum):
    """Why a report was written; the ways to differ stand in the order in which they are looked for.

    Members compare equal to their lower-case names.
    """

    KIND = "kind"
    NAME = "name"
    REDUCE_OP = "reduce_op"
    AXIS = "axis"
    SOURCE = "source"
    MERGE_FN = "merge_fn"
    STRUCTURE = "structure"
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    CALL_SITE = "call_site"
    EXITED = "exited"
    ABANDONED = "abandoned"
    TIMEOUT = "timeout"
    CYCLE = "cycle"  # replicas wait for each other, each in a collective of another group
    DEADLOCK = "deadlock"
    LIVELOCK = "livelock"
    GROUP = "group"
    UNMATCHED = "unmatched"
    WORKER_LOST = "worker_lost"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one replica did, up to a disagreement.

    Attributes:
        replica_id: its id in the sync group.
        device: its device, in canonical form.
        state: what it was doing.
        call: what it asked for, e.g. ``all_reduce(SUM, float32[3])``; None unless it waits.
        location: where it asked for that; None unless it waits.
        history: its last collectives, newest last; one that it waits in is the last.
        stack: the places where it is suspended or runs, innermost last; empty once it has ended.
        returned: what its function returned, as text: the value where that is a number, a string or None, else its
            type; None unless it has returned.
        ended_at: where its function returned; None where that is not known.
        waits_for: what it waits for outside of collectives, in words, e.g. ``waits for an asyncio.Lock, which replica 0
            holds``; None where nobody looked, or it waits in a collective.
    """

    replica_id: int
    device: str
    state: ReplicaState
    call: str | None = None
    location: Location | None = None
    history: tuple[CallRecord, ...] = ()
    stack: tuple[Location, ...] = ()
    returned: str | None = None
    ended_at: Location | None = None
    waits_for: str | None = None


class DivergenceKind(enum.StrEnum):
    """How replicas diverged. Members compare equal to their lower-case names."""

    SKIPPED = "skipped"
    ADDED = "added"
    SWAPPED = "swapped"
    LEFT_LOOP = "left_loop"
    OTHER_BRANCH = "other_branch"


class Partition(NamedTuple):
    """Replicas that asked for the same collective.

    Attributes:
        replicas: their ids, ascending.
        call: what they asked for.
        location: where the first of them did.
        majority: whether they are more than any other partition, and than those that are gone.
    """

    replicas: tuple[int, ...]
    call: str
    location: Location
    majority: bool


@dataclass(frozen=True, slots=True)
class Divergence:
    """What the replicas' calls, laid beside each other, say of where they diverged.

    Attributes:
        kind: how.
        replicas: who skipped, added or swapped calls, left the loop, or took the branch first told of.
        others: those that they are compared with.
        calls: the calls that were skipped, added or swapped; for a loop, the last that both made in it.
        certain: the calls themselves show it. Otherwise the earlier rounds of a loop do, or the program's source.
        text: the same in a sentence.
    """

    kind: DivergenceKind
    replicas: tuple[int, ...]
    others: tuple[int, ...]
    calls: tuple[CallRecord, ...]
    certain: bool
    text: str


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """Who differs, in what, and where: attached to every `CollectiveError` as ``.report``.

    Attributes:
        reason: the first thing that differs, in the order of `Reason`.
        sequence_number: the 0-based position of the collective, the same on every replica up to here.
        replicas: one `ReplicaReport` each, by replica id.
        suspects: ids of the minority, ascending; all on a tie; for an incomplete collective those that are missing,
            or, when most have left, those that wait.
        text: the whole report for a person; what `str` gives.
        group: what the group of replicas is called; None for all replicas of the run.
        partitions: who asked for the same collective, the majority first.
        divergence: how they diverged, where that is known.
        advice: what to do, as lines.
    """

    reason: Reason
    sequence_number: int
    replicas: tuple[ReplicaReport, ...]
    suspects: tuple[int, ...]
    text: str = field(repr=False)
    group: str | None = None
    partitions: tuple[Partition, ...] = ()
    divergence: Divergence | None = None
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of strings, numbers, lists and dicts, as JSON has them.

        Its keys are the attributes' names, and ``schema``, which is 2. A location is a dict of ``file``, ``line`` and
        ``function``, a call one of ``sequence_number``, ``call`` and ``location``. A replica's ``history`` is an index
        into the list ``histories``, for most replicas have one history in common.
        """
        histories = list({id(r.history): r.history for r in self.replicas}.values())
        index = {id(history): i for i, history in enumerate(histories)}
        return {
            "schema": 2,
            "reason": str(self.reason),
            "sequence_number": self.sequence_number,
            "group": self.group,
            "suspects": list(self.suspects),
            "replicas": [_replica_to_dict(replica, index[id(replica.history)]) for replica in self.replicas],
            "histories": [[_call_to_dict(call) for call in history] for history in histories],
            "partitions": [
                {**each._asdict(), "replicas": list(each.replicas), "location": _place_to_dict(each.location)}
                for each in self.partitions
            ],
            "divergence": None if self.divergence is None else _divergence_to_dict(self.divergence),
            "advice": list(self.advice),
            "text": self.text,
        }

    def to_json(self) -> str:
        """Return the report as JSON, with the keys that `to_dict` describes."""
        import json

        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CollectiveReport:
        """Return the report that `to_dict` gave, be it by way of JSON.

        Raises:
            ValueError: it is of another schema.
        """
        if data.get("schema") != 2:
            raise ValueError(f"expected a report of schema 2, got {data.get('schema')!r}")
        histories = [tuple(_call(call) for call in history) for history in data["histories"]]
        return cls(
            reason=Reason(data["reason"]),
            sequence_number=data["sequence_number"],
            replicas=tuple(_replica(replica, histories[replica["history"]]) for replica in data["replicas"]),
            suspects=tuple(data["suspects"]),
            text=data["text"],
            group=data["group"],
            partitions=tuple(
                Partition(tuple(each["replicas"]), each["call"], Location(**each["location"]), each["majority"])
                for each in data["partitions"]
            ),
            divergence=None if data["divergence"] is None else _divergence(data["divergence"]),
            advice=tuple(data["advice"]),
        )


def _place_to_dict(location: Location | None) -> dict[str, Any] | None:
    return None if location is None else location._asdict()


def _call_to_dict(call: CallRecord) -> dict[str, Any]:
    return {**call._asdict(), "location": call.location._asdict()}


def _replica_to_dict(replica: ReplicaReport, history: int) -> dict[str, Any]:
    return {
        "replica_id": replica.replica_id,
        "device": replica.device,
        "state": str(replica.state),
        "call": replica.call,
        "location": _place_to_dict(replica.location),
        "history": history,
        "stack": [place._asdict() for place in replica.stack],
        "returned": replica.returned,
        "ended_at": _place_to_dict(replica.ended_at),
        "waits_for": replica.waits_for,
    }


def _divergence_to_dict(divergence: Divergence) -> dict[str, Any]:
    return {
        "kind": str(divergence.kind),
        "replicas": list(divergence.replicas),
        "others": list(divergence.others),
        "calls": [_call_to_dict(call) for call in divergence.calls],
        "certain": divergence.certain,
        "text": divergence.text,
    }


def _place(data: dict[str, Any] | None) -> Location | None:
    return None if data is None else Location(**data)


def _call(data: dict[str, Any]) -> CallRecord:
    return CallRecord(data["sequence_number"], data["call"], Location(**data["location"]))


def _replica(data: dict[str, Any], history: tuple[CallRecord, ...]) -> ReplicaReport:
    return ReplicaReport(
        **{
            **data,
            "state": ReplicaState(data["state"]),
            "location": _place(data["location"]),
            "history": history,
            "stack": tuple(Location(**place) for place in data["stack"]),
            "ended_at": _place(data["ended_at"]),
        }
    )


def _divergence(data: dict[str, Any]) -> Divergence:
    return Divergence(
        DivergenceKind(data["kind"]),
        tuple(data["replicas"]),
        tuple(data["others"]),
        tuple(_call(call) for call in data["calls"]),
        data["certain"],
        data["text"],
    )
