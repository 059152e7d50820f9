"""Reports: descriptions of disagreements between replicas, as values that can be pickled, compared and kept."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.wire import DAMAGE, named, unpack


class CallRecord(NamedTuple):
    """One collective in a replica's history.

    Attributes:
        sequence_number: its position in the replica's program, from 0.
        call: the call as text, e.g. ``all_reduce(SUM, float32[3])``.
        location: the call site.
    """

    sequence_number: int
    call: str
    location: Location


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one replica did, up to a disagreement.

    Attributes:
        replica_id: its id in the run.
        device: its device, in canonical form.
        state: what it was doing.
        call: the collective that it waits in, e.g. ``all_reduce(SUM, float32[3])``; None unless it waits.
        location: the site of that call; None unless it waits.
        history: its last collectives, newest last, with the one that it waits in.
        stack: where it is suspended or runs, innermost last; empty once it has ended.
        returned: what its function returned, as text: numbers, strings and None by value, anything else by type; None
            unless it has returned.
        ended_at: where its function returned; None if that is not known.
        waits_for: what it waits for outside of collectives, e.g. ``waits for an asyncio.Lock, which replica 0 holds``;
            None if it waits in a collective, or if that is not known.
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
    """Replicas that called the same collective.

    Attributes:
        replicas: their ids, ascending.
        call: the call as text.
        location: the call site of the first of them.
        majority: whether it is larger than every other partition, and than the number of replicas that are gone.
    """

    replicas: tuple[int, ...]
    call: str
    location: Location
    majority: bool


@dataclass(frozen=True, slots=True)
class Divergence:
    """How replicas diverged, found by aligning their calls.

    Attributes:
        kind: "skipped", "added" or "swapped" calls, "left_loop", or "other_branch".
        replicas: ids of the replicas that diverged: that skipped, added or swapped calls, left the loop, or took the
            other branch.
        others: ids of the replicas that they are compared with.
        calls: the calls that were skipped, added or swapped; for a loop, the call in it that the others made next.
        certain: whether the calls themselves show it. If not, it follows from the earlier rounds of a loop, or from the
            program's source.
        text: the same as a sentence.
    """

    kind: DivergenceKind
    replicas: tuple[int, ...]
    others: tuple[int, ...]
    calls: tuple[CallRecord, ...]
    certain: bool
    text: str


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """Which replicas differ, in what, and where. Every `CollectiveError` has one as ``.report``.

    Attributes:
        reason: why the report was made; for a mismatch the first thing that differs, in the order of `Reason`.
        sequence_number: the position of the collective in each replica's program, from 0.
        replicas: a `ReplicaReport` for each replica, by id.
        suspects: ids of the minority, ascending; all on a tie, where nobody is marked or blamed. For an incomplete
            collective the ids of those that are missing or, if most have left, of those that wait.
        text: the report as text, which `str` returns.
        group: the name of the group, e.g. ``group 'rows' of replicas 0 and 1``; None for all replicas of the run.
        partitions: the replicas by what they called, the majority first.
        divergence: how the replicas diverged; None if that is not known.
        advice: what to do, as lines of text.
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

    def _repr_html_(self) -> str:
        """Return the text for notebooks, with the lines of the minority in bold."""
        from html import escape

        lines = [f"<b>{line}</b>" if line.startswith("&gt; ") else line for line in escape(self.text).splitlines()]
        return f"<pre>{'<br>'.join(lines)}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of the types that JSON has.

        Its keys are the attributes' names, and ``schema``, which is 2. A location is a dict of ``file``, ``line`` and
        ``function``; a call is a dict of ``sequence_number``, ``call`` and ``location``. A replica's ``history`` is an
        index into the list ``histories``, because most replicas have the same one. The documentation has a JSON schema.
        """
        histories = list({id(r.history): r.history for r in self.replicas}.values())
        index = {id(history): i for i, history in enumerate(histories)}
        replicas = [{**named(replace(r, history=())), "history": index[id(r.history)]} for r in self.replicas]
        plain = named(replace(self, replicas=()))
        return {"schema": 2, **plain, "replicas": replicas, "histories": named(tuple(histories))}

    def to_json(self) -> str:
        """Return the dict of `to_dict` as a JSON string."""
        import json

        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CollectiveReport:
        """Return the report that `to_dict` has written, also if the dict has gone through JSON.

        Raises:
            ValueError: the dict is not such a report, or has another schema.
        """
        try:
            if data.get("schema") != 2:
                raise ValueError(f"expected a report of schema 2, got {data.get('schema')!r}")
            own = {each.name: data[each.name] for each in fields(cls)}
            histories = unpack(tuple[tuple[CallRecord, ...], ...], data["histories"])
            replicas = [
                replace(unpack(ReplicaReport, {**each, "history": []}), history=histories[each["history"]])
                for each in data["replicas"]
            ]
        except DAMAGE as error:
            raise ValueError(f"expected a report, got something else: {error!r}") from error
        report: CollectiveReport = unpack(cls, {**own, "replicas": []})
        return replace(report, replicas=tuple(replicas))
