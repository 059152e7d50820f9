"""Programs of collectives, and their runs on a ledger in a plain loop.

A program is one replica's operations. Those that hypothesis draws are one program for all replicas, changed in up to
two places. Replicas take turns in the order that a run is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from aiodist._core.call import LEAF, Call, Function, OrderCheck, Place
from aiodist._core.ledger import Group, Ledger, Member, Slot
from aiodist._core.snapshot import ReplicaFacts, Snapshot
from aiodist._core.terms import Location, ReplicaState

FILE = "program.py"
_LAST_LINE = 99


def _call(kind: str, op: str | None = None, shape: tuple[int | None, ...] = (3,), **more: Any) -> Call:
    """Return a call with an array of float32."""
    return Call(kind, op, shapes=(shape,), dtypes=("float32",), arrays=("array",), paths=("",), **more)


def _nest(structure: str, *paths: str) -> Call:
    """Return a call with an array and a number."""
    leaves: dict[str, Any] = {"shapes": ((3,), ()), "dtypes": ("float32", "float"), "arrays": ("array", "number")}
    return Call("all_reduce", "SUM", structure=structure, paths=paths, **leaves)


_MERGE = Function("merge", FILE, 3, "a")
CALLS = (
    Call("barrier"),
    _call("all_reduce", "SUM"),
    _call("all_reduce", "MAX"),
    _call("all_reduce", "SUM", shape=(4,)),
    _nest(f"{{'b': {LEAF}, 'w': [{LEAF}]}}", "['b']", "['w'][0]"),
    _nest(f"({LEAF}, {LEAF})", "[0]", "[1]"),
    _call("all_gather", shape=(None,), axis=(0,)),
    _call("broadcast", source=0),
    _call("broadcast", source=1),
    Call("barrier", name="end"),
    Call("merge_call", function=_MERGE, structure=f"([{LEAF}], {{}})", arguments=(1, ())),
    Call("merge_call", function=_MERGE, structure="([], {})", arguments=(0, ())),
)
_JOIN = Call("join")


class Op(NamedTuple):
    """One operation of a replica."""

    what: str  # post, make (a group), join, cancel (a post whose await is cancelled at once), return or raise
    line: int
    group: int = 0  # 0 is the run's own group, others follow in the order of their making
    call: int = 0  # an index into `CALLS`
    waits: bool = True  # it is awaited at once; otherwise at the end of the program
    members: tuple[int, ...] = ()  # of a group that is made, by their ids in the run
    name: str | None = None  # of a group that is made
    makes: int = 0  # the index of the group that is made


Program = tuple[Op, ...]


class _Replica:
    """A replica that runs."""

    def __init__(self, member: Member) -> None:
        self.members = {0: member}
        self.waits = False
        self.end: ReplicaState | None = None
        self.at = 1
        self.cancelled_in: tuple[tuple[str, int], ...] = ()


class Run:
    """A run of one program for each replica."""

    def __init__(self, programs: Sequence[Program], order_check: OrderCheck) -> None:
        self.ledger = Ledger(range(len(programs)), order_check)
        self.replicas = [_Replica(member) for member in self.ledger.root.members]
        self._steps = list(map(self._play, self.replicas, programs))

    def go(self, turns: Sequence[int]) -> None:
        """Let replicas that can run take turns, again and again in that order, by default the lowest until it waits."""
        for count in itertools.count():
            ready = [i for i, replica in enumerate(self.replicas) if replica.end is None and not replica.waits]
            if not ready:
                break
            turn = turns[count % len(turns)] if turns else 0
            next(self._steps[ready[turn % len(ready)]], None)

    def _play(self, replica: _Replica, program: Program) -> Iterator[None]:
        """Carry out a replica's operations, and yield after each turn, also where it waits."""
        pending: list[tuple[Member, Slot, int]] = []
        for op in program:
            replica.at = op.line
            if op.what in ("return", "raise"):
                self._end(replica, ReplicaState.EXITED if op.what == "return" else ReplicaState.FAILED)
                return
            member = replica.members.get(op.group)
            if member is None or (op.what == "make" and member.replica_id not in op.members):
                continue
            place = Place(FILE, op.line, 4, "train")  # equal for all replicas, but not identical
            group = member.group
            if op.what == "make":
                ranks = tuple(group.key[0].index(i) for i in op.members)
                replica.members[op.makes] = group.new_group(member, ranks, op.name, place, 0)
            elif op.what == "join":
                group.join(member, _JOIN, place, 0)
                join = group.joining
                self._advance(group)
                yield from self._wait(replica, member, join, op.line)
            else:
                slot = group.post(member, CALLS[op.call], place, 0)
                self._advance(group)
                if op.what == "cancel" and not slot.complete:
                    group.abandon(member, slot)
                    replica.cancelled_in = ((FILE, op.line),)
                elif op.waits:
                    yield from self._wait(replica, member, slot, op.line)
                else:
                    pending.append((member, slot, op.line))
            yield
        for member, slot, line in pending:
            yield from self._wait(replica, member, slot, line)
        replica.at = _LAST_LINE
        self._end(replica, ReplicaState.EXITED)

    def _wait(self, replica: _Replica, member: Member, slot: Slot | None, line: int) -> Iterator[None]:
        if slot is not None and not slot.complete:
            slot.waiters[member.position] = replica
            replica.waits = True
            replica.at = line
            if member.group.doomed is not None:
                member.group.update_settled(member)
            yield

    def _end(self, replica: _Replica, state: ReplicaState) -> None:
        replica.end = state
        self.ledger.end(replica.members[0].replica, state)

    def _advance(self, group: Group) -> None:
        """Complete the matched collectives of a group in order, and then its join."""
        while group.open and (slot := group.open[min(group.open)]).matched:
            self._resume(group, slot)
        if group.joining is not None and group.joining.matched and not group.open:
            slot = group.joining
            group.finish_join(slot, group.number_of_join())
            self._resume(group, slot)

    def _resume(self, group: Group, slot: Slot) -> None:
        group.complete(slot)
        for waiter in slot.waiters:
            if waiter is not None:
                waiter.waits = False

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the run."""
        blocked = tuple(i for i, replica in enumerate(self.replicas) if replica.waits)
        return self.ledger.snapshot(itertools.starmap(self._facts, enumerate(self.replicas)), blocked=blocked)

    def _facts(self, replica_id: int, replica: _Replica) -> ReplicaFacts:
        here = Location(FILE, replica.at, "train")
        exited = replica.end is ReplicaState.EXITED
        return ReplicaFacts(
            replica_id,
            f"CPU:{replica_id}",
            replica.end,
            stack=(here,) if replica.end is None else (),
            returned="None" if exited else None,
            ended_at=here if exited else None,
            cancelled_in=replica.cancelled_in,
        )

    @property
    def completed(self) -> bool:
        """Whether every replica has ended, and no collective is open."""
        return all(replica.end is not None for replica in self.replicas) and not self.ledger.open_slots()


# Drawing programs.


class Drawn(NamedTuple):
    """Drawn programs, one for each replica. Operations on a group are ignored by replicas that are not its members."""

    programs: list[Program]
    order_check: OrderCheck

    def run(self, turns: Sequence[int] = ()) -> Run:
        """Return a finished run of the programs."""
        run = Run(self.programs, self.order_check)
        run.go(turns)
        return run


turns = st.lists(st.integers(0, 59), max_size=6)


class _Choices:
    """Choices by the bytes of a string, which hypothesis draws at once; after its end, always the first."""

    def __init__(self, string: bytes) -> None:
        self._bytes = iter(string)

    def below(self, number: int) -> int:
        """Choose a number from 0."""
        return next(self._bytes, 0) % number

    def some(self, of: Sequence[int]) -> tuple[int, ...]:
        """Choose at least one, in any order."""
        left = list(of)
        return tuple(left.pop(self.below(len(left))) for _ in range(1 + self.below(len(of))))


def drawn(
    changes: int = 2, *, groups: bool = True, joins: bool = True, cancels: bool = True
) -> st.SearchStrategy[Drawn]:
    """Draw a program, and up to that many changes of single replicas' programs."""
    what = ["drop", "again", "swap", "call", "line", "return", "raise", "later"]
    what += ["join"] * joins + ["cancel"] * cancels

    def of(string: bytes) -> Drawn:
        choices = _Choices(string)
        replicas = 2 + choices.below(4)
        common = _common(choices, replicas, groups=groups)
        if joins and choices.below(3) == 1:
            common = (*common, Op("join", len(common)))
        programs = [common] * replicas
        for _ in range(choices.below(changes + 1)):
            replica_id, at = choices.below(replicas), choices.below(len(common))
            if at < len(programs[replica_id]):
                programs[replica_id] = _changed(programs[replica_id], what[choices.below(len(what))], at)
        return Drawn(programs, list(OrderCheck)[choices.below(3)])

    return st.binary(max_size=48).map(of)


def _common(choices: _Choices, replicas: int, *, groups: bool) -> Program:
    made = [tuple(range(replicas))]
    program = []
    for line in range(1 + choices.below(5)):
        group = choices.below(len(made))
        if groups and choices.below(4) == 1:
            name = f"g{len(made)}" if choices.below(2) else None
            program.append(Op("make", line, group, members=choices.some(made[group]), name=name, makes=len(made)))
            made.append(program[-1].members)
        else:
            program.append(Op("post", line, group, choices.below(len(CALLS)), waits=choices.below(4) != 1))
    return tuple(program)


def _changed(program: Program, what: str, at: int) -> Program:
    """Return a program with one change at an operation."""
    before, op, after = program[:at], program[at], program[at + 1 :]
    if what == "drop":
        return before + after
    if what == "again":
        return (*before, op, op, *after)
    if what == "swap":
        return (*before, *after[:1], op, *after[1:])
    if what in ("return", "raise", "join"):
        return (*before, Op(what, op.line), op, *after)
    if op.what not in ("post", "cancel"):
        return program
    instead = {
        "call": op._replace(call=(op.call + 1) % len(CALLS)),
        "line": op._replace(line=op.line + 50),
        "later": op._replace(waits=not op.waits),
        "cancel": op._replace(what="cancel"),
    }
    return (*before, instead[what], *after)
