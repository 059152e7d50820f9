"""Several workers in a plain loop: ledgers, teams and sessions over the simulated engine, without any event loop.

A program is a list of operations for each replica. Who acts next is drawn: a replica, a delivery of the engine, or a
message of the control connection; so every order in which a real job could do things can come up.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from aiodist._collectives import kinds
from aiodist._core.call import Call, Place
from aiodist._core.errors import CollectiveError
from aiodist._core.ledger import Group, Ledger, Member, Slot
from aiodist._core.snapshot import ReplicaFacts, Snapshot
from aiodist._core.terms import ReplicaState
from aiodist._workers.coordinator import Coordinator
from aiodist._workers.engines.simulated import SimulatedCluster
from aiodist._workers.layout import Layout
from aiodist._workers.messages import Lost, Message, decode, encode
from aiodist._workers.record import Found
from aiodist._workers.session import Session
from aiodist._workers.team import Span, Team
from aiodist._workers.transport import Steps, as_bytes


class Op(NamedTuple):
    """One thing that a replica does.

    Attributes:
        what: ``call``, ``issue`` (a call that is awaited at the end), ``join``, ``group`` (makes a group), ``raise``.
        line: where.
        kind: of a call, what it asks for.
        group: which of the replica's groups it is in, 0 for the run's own.
        ranks: of a group that is made, its members.
    """

    what: str
    line: int
    kind: str = "all_reduce"
    group: int = 0
    ranks: tuple[int, ...] = ()


Program = Sequence[Sequence[Op]]


class PlainSlot(Slot):
    """A slot with values and a request, as far as a span looks at them."""

    request: Any = None
    outs = None
    options = SimpleNamespace(accumulate="native")
    result: Any = None
    shared = True

    def __init__(self, *slot: Any) -> None:
        super().__init__(*slot)
        self.values: list[Any] = [0] * len(self.group.members)


class PlainRun:
    """A run of local replicas, of which each does its next operation on request.

    Args:
        ids: those replicas.
        total: how many there are over all workers.
        program: of all replicas.
    """

    def __init__(self, ids: Sequence[int], total: int, program: Program) -> None:
        self.ledger = Ledger(ids, total=total, slot_type=PlainSlot)
        self.span: Any = None
        self.error: CollectiveError | None = None
        self.results: dict[int, list[Any]] = {i: [] for i in ids}
        self.replicas = {member.replica_id: _Replica(self, member, program[member.replica_id]) for member in
                         self.ledger.root.members}  # fmt: skip
        self.judged = False
        self.failures: dict[int, BaseException] = {}

    # What a span calls.

    def complete(self, slot: Any, result: Any, error: BaseException | None) -> None:
        assert error is None
        if not slot.complete:
            slot.result = result
            slot.group.complete(slot)

    def start_merge(self, slot: Any) -> None:
        self.complete(slot, "merged", None)

    def finish_join(self, slot: Any, number: int, last: int) -> None:
        slot.group.finish_join(slot, number)
        self.complete(slot, ("last", last), None)

    def doom(self, group: Group, number: int) -> None:
        group.doom(number)
        self.reconsider(group)

    def fail(self, error: CollectiveError) -> None:
        self.error = error

    def snapshot(self, **more: Any) -> Snapshot:
        facts = [ReplicaFacts(r.id, f"CPU:{i}", r.end) for i, r in enumerate(self.ledger.replicas)]
        return self.ledger.snapshot(facts, **more)

    # What replicas call.

    def matched(self, slot: Any) -> None:
        if slot.group.size != len(slot.group.members):
            self.span.matched(slot)
        elif slot is slot.group.joining:
            self.finish_join(slot, slot.group.number_of_join(), slot.values[0])
        else:
            if slot.request.kind is kinds.MERGE_CALL and not slot.absent:
                self.start_merge(slot)
                return
            there = [value for position, value in enumerate(slot.values) if position not in slot.absent]
            self.complete(slot, sum(there), None)

    def reconsider(self, group: Group) -> None:
        if group.doomed is None or self.error is not None or self.judged:
            return
        if not group.unsettled and not all(member.replica.end is not None for member in group.members):
            self.judged = True
            self.span.troubled(group, None)

    @property
    def ended(self) -> bool:
        return all(replica.end is not None for replica in self.ledger.replicas)

    def waiting_for_good(self) -> tuple[int, ...]:
        return tuple(i for i, replica in self.replicas.items() if replica.waits_for)

    def look(self) -> None:
        """Look whether replicas wait for ever, as a runtime does now and then."""
        for group in self.ledger.troubled:  # as when the time is up in which replicas may settle
            if not self.judged:
                self.judged = True
                self.span.troubled(group, None)
        blocked = self.waiting_for_good()
        if blocked and len(self.ledger.groups()) > 1:  # as a runtime looks
            self.span.stuck(blocked)
            self.span.stuck(blocked)


class _Replica:
    """One replica, and where it is in its program."""

    def __init__(self, run: PlainRun, member: Member, ops: Sequence[Op]) -> None:
        self.run = run
        self.members = [member]
        self.ops = deque(ops)
        self.waits_for: list[Any] = []
        self.issued: list[Any] = []

    @property
    def replica(self) -> Any:
        return self.members[0].replica

    def can_act(self) -> bool:
        if self.run.error is not None or self.replica.end is not None:
            return False
        return all(slot.complete for slot in self.waits_for)

    def act(self) -> None:  # noqa: C901, PLR0912  (one branch an operation)
        """Do the next operation."""
        run = self.run
        run.results[self.replica.id] += [slot.result for slot in self.waits_for]
        self.waits_for = []
        if not self.ops:
            if self.issued:
                self._wait(self.issued)
                self.issued = []
            else:
                self._end(ReplicaState.EXITED)
            return
        op = self.ops.popleft()
        slot: Any
        if op.what == "raise":
            run.failures[self.replica.id] = ValueError("bad batch")
            self._end(ReplicaState.FAILED)
            return
        member = self.members[op.group] if op.group < len(self.members) else self.members[0]
        place = Place("program.py", op.line, 0, "step")
        if op.what == "join":
            matched = member.group.join(member, Call("join"), place, 0)
            slot = member.group.joining
            slot.request = SimpleNamespace(kind=kinds.JOIN, over_workers=None)
            slot.values = [member.rank]
            for each in matched:
                run.matched(each)
            self._wait([slot])
        elif op.what == "group":
            made = member.group.new_group(member, op.ranks, None, place, 0)
            self.members.append(made)
            if made.group.size != len(made.group.members):
                run.span.made(made.group)
            run.reconsider(made.group)
        else:
            call = Call(op.kind, op="SUM") if op.kind == "all_reduce" else Call(op.kind)
            slot = member.group.post(member, call, place, 0)
            slot.request = SimpleNamespace(kind=getattr(kinds, op.kind.upper()), over_workers=None)
            slot.values[member.position] = 3 ** (self.replica.id % 30)
            if slot.matched:
                run.matched(slot)
            if op.what == "issue":
                self.issued.append(slot)
                run.reconsider(member.group)
            else:
                self._wait([slot])
        for group in {m.group for m in self.members}:
            run.reconsider(group)

    def _wait(self, slots: list[Any]) -> None:
        self.waits_for = slots
        for slot in slots:
            if not slot.complete:
                member = next(m for m in self.members if m.group is slot.group)
                slot.waiters[member.position] = self
                if slot.group.doomed is not None:
                    slot.group.consider(member)
                    self.run.reconsider(slot.group)

    def _end(self, state: ReplicaState) -> None:
        run = self.run
        if state is ReplicaState.FAILED:  # which ends the run on its worker
            run.error = run.error or CollectiveError(None)  # type: ignore[arg-type]
        run.ledger.end(self.replica, state)
        for group in run.ledger.groups():
            run.reconsider(group)
        if state is ReplicaState.FAILED:
            for other in run.replicas.values():
                if other.replica.end is None:
                    run.ledger.end(other.replica, ReplicaState.FAILED)


class PlainSmall:
    """Adds numbers up that lie in the records."""

    def __init__(self, session: Session) -> None:
        self._own = session.records.payload[:8].view(np.int64)
        self._all = [payload[:8].view(np.int64) for payload in session.records.payloads]

    def write(self, values: Sequence[int]) -> int:
        self._own[0] = sum(values)
        return 8

    def take(self, slot: Any, found: Found) -> int:
        return int(sum(each[0] for each in self._all))


class PlainMover:
    """Adds numbers up, at every second call site in the record, at the others behind it."""

    def ways(self, session: Session, slot: Any) -> tuple[PlainSmall | None, None]:
        has_value = slot.request.kind is not kinds.MERGE_CALL
        small = PlainSmall(session) if has_value and session.records.in_full and slot.code.line % 2 == 0 else None
        return small, None

    def move(self, session: Session, slot: Any, found: Found, prepared: None) -> Steps[Any]:
        return self.gather(session, slot)

    def gather(self, session: Session, slot: Any) -> Steps[Any]:
        there = [] if slot is None else [v for p, v in enumerate(slot.values) if p not in slot.absent]
        everyone = np.empty(session.communicator.size, np.int64)
        yield session.communicator.iallgather(as_bytes(np.array([sum(there)], np.int64)), as_bytes(everyone))
        return int(everyone.sum())


class PlainControl:
    """A worker's connection: messages wait until they are drawn."""

    def __init__(self, job: PlainJob, team: Team) -> None:
        self._job, self._rank = job, team.layout.rank

    def send(self, message: Message) -> None:
        self._job.to_coordinator[self._rank].append(encode(message))

    def close(self) -> None: ...


class PlainJob:
    """All workers.

    Args:
        counts: by worker, how many replicas it has.
        program: of all replicas.
        seed: what is drawn comes of it.
    """

    def __init__(self, counts: Sequence[int], program: Program, seed: int) -> None:
        self.draw = random.Random(seed)
        self.cluster = SimulatedCluster(len(counts), held=True)
        devices = [[f"CPU:{i}" for i in range(count)] for count in counts]
        self.layout = Layout(0, devices)
        self.coordinator = Coordinator(self.layout)
        self.to_coordinator: list[deque[bytes]] = [deque() for _ in counts]
        self.to_worker: list[deque[bytes]] = [deque() for _ in counts]
        self.teams: list[Team] = []
        self.runs: list[PlainRun] = []
        mover: Any = PlainMover()
        for rank, communicator in enumerate(self.cluster.communicators):
            layout = Layout(rank, devices)
            team = Team(layout, communicator, partial(PlainControl, self))
            run: Any = PlainRun(layout.own, layout.replicas, program)
            team.moving = mover
            run.span = Span(team, 0, 0, communicator, run)
            self.teams.append(team)
            self.runs.append(run)
        self._ended: set[int] = set()
        self.dead: int | None = None

    def kill(self, rank: int) -> None:
        """Let a worker die, and what it has sent be lost; the others hear of it from the coordinator, or lose that."""
        self.dead = rank
        for _ in range(self.draw.randint(0, len(self.to_coordinator[rank]))):
            self.to_coordinator[rank].pop()
        if rank:
            while self.to_coordinator[rank]:
                self._to_coordinator(rank)
            self._send(self.coordinator.lose(rank, "has died"))
        else:
            self._send([(range(1, len(self.runs)), Lost(0, "has died"))])

    def go(self, most: int = 20_000, *, kill: tuple[int, int] | None = None) -> None:
        """Draw who acts next until nobody can; then let runs look whether replicas wait for ever.

        Args:
            most: how many actions there are at most.
            kill: which worker dies, and after how many actions.
        """
        looks = 0
        for turn in range(most):
            if kill is not None and turn == kill[1]:
                self.kill(kill[0])
            actions = self._actions()
            if actions:
                self.draw.choice(actions)()
            elif self.over or looks == 5:
                return
            else:
                looks += 1
                for run in self.survivors:
                    if run.error is None:
                        run.look()
        raise AssertionError("still going on")

    @property
    def over(self) -> bool:
        return all(run.error is not None or run.span.is_over for run in self.survivors)

    @property
    def survivors(self) -> list[PlainRun]:
        """The runs of workers that live."""
        return [run for rank, run in enumerate(self.runs) if rank != self.dead]

    def _actions(self) -> list[Callable[[], Any]]:
        found: list[Callable[[], Any]] = []
        for rank, run in enumerate(self.runs):
            if rank == self.dead:
                continue
            found += [replica.act for replica in run.replicas.values() if replica.can_act()]
            if run.ended and rank not in self._ended:
                found.append(partial(self._end, rank))
        found += [partial(self._deliver, i) for i in range(len(self.cluster.held or ()))]
        told = enumerate(self.to_coordinator if self.dead != 0 else ())
        found += [partial(self._to_coordinator, r) for r, queue in told if queue]
        found += [partial(self._to_worker, r) for r, queue in enumerate(self.to_worker) if queue and r != self.dead]
        return found

    def _end(self, rank: int) -> None:
        self._ended.add(rank)
        self.runs[rank].span.end(self.runs[rank].failures)

    def _deliver(self, index: int) -> None:
        self.cluster.release(index)
        for rank, team in enumerate(self.teams):
            if rank != self.dead:
                while team.driver._advance_all():
                    pass

    def _to_coordinator(self, rank: int) -> None:
        self._send(self.coordinator.take(rank, decode(self.to_coordinator[rank].popleft())))

    def _to_worker(self, rank: int) -> None:
        self.teams[rank].receive(decode(self.to_worker[rank].popleft()))

    def _send(self, sent: Any) -> None:
        for ranks, message in sent:
            for rank in ranks:
                self.to_worker[rank].append(encode(message))


def on_one_machine(total: int, program: Program, seed: int) -> PlainRun:
    """Return a run of the same program on one worker, at its end: no collective leaves the runtime there."""
    job = PlainJob([total], program, seed)
    job.go()
    return job.runs[0]
