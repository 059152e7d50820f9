"""What a script's ranks have issued, and what each collective computes; who waits for what, what has gone wrong.

Every call is compared by what it asks for alone; its place, and those of its callers, are noted for the report, and for
equal calls in another order: values of different calls have been combined, which torch does not notice. Places alone
say nothing, for one rank may publish what others receive elsewhere; but where places differ, and a few calls later all
ranks have been at the same ones with the same calls, each in an order of its own, calls have been swapped. Two places
are the same by their line, or by the text of the call in one function: ranks may be in different branches.

A rank that takes a future is taken to wait for it there and then, for what takes one (DDP) waits for it in C++, where
nobody can let other ranks run. If no rank can go on, it gets one that is not complete.

A collective is carried out once every rank has come. Reductions are left folds in the order of ranks, in the tensors'
own dtype.
"""

from __future__ import annotations

import linecache
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, reduce
from itertools import chain, islice
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

from aiodist._checking.schedule import Order
from aiodist._core.analysis import error_of
from aiodist._core.call import MESSAGE, Call, OrderCheck, Place, Post, place
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import Observer, current_observer
from aiodist._core.ledger import Group, Ledger, Member, Slot
from aiodist._core.snapshot import ReplicaFacts, Snapshot
from aiodist._core.terms import Location, ReplicaState
from aiodist._core.text import place as shown_place
from aiodist._torch.private import torch
from aiodist._torch.ranks import OnSwitch, Ranks
from aiodist._torch.report import NEW_GROUP, call_of_tensors, report_on

_PLUMBING = tuple(
    f"{Path(module.__file__ or '').resolve().parent}{os.sep}" for module in (torch, sys.modules["aiodist"], os)
)
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
_DECORATORS = f"{os.sep}typing_extensions.py"  # which marks torch's deprecated functions
_MOST_CALLERS = 8
_UNKNOWN = Place("<unknown>", 1, None, "?")
_MOST_LINES = 10  # of a call
_MOST_SWAPPED = 8  # over how many calls of a group the order of places is compared
_LENGTH_OF_HASH = 32  # which torch names groups by that their members alone make

Sites: TypeAlias = tuple[Place, tuple[Any, ...]]
"""A call's place, and those of its callers, each with an offset of 0, as the ledger has it."""


@cache
def is_plumbing(file: str) -> bool:
    """Return whether a file is torch's, the standard library's or ours, not the program's."""
    own = file.startswith(_PLUMBING) and not (_SITE_PACKAGES in file and not file.startswith(_PLUMBING[:2]))
    return own or file.startswith("<frozen") or file.endswith(_DECORATORS)


_sites: dict[Sites, Sites] = {}


def _places(frame: Any) -> Iterator[Place]:
    """Yield where the program's own frames are, from the innermost outward."""
    while frame is not None:
        if not is_plumbing(frame.f_code.co_filename):
            yield place(frame.f_code, frame.f_lasti)
        frame = frame.f_back


def _here() -> Sites:
    """Return where the program makes the current call, and where its callers are."""
    first, *callers = [*islice(_places(sys._getframe(2)), _MOST_CALLERS)] or [_UNKNOWN]  # noqa: SLF001  (documented)
    sites = first, tuple(part for caller in callers for part in (caller, 0))
    return _sites.setdefault(sites, sites)


def _text(at: Place) -> tuple[str, str, str] | Place:
    """Return what a call looks like up to where its parentheses end, with its file and function; else the place."""
    text, column = "", at.column or 0
    for line in linecache.getlines(at.file)[at.line - 1 : at.line + _MOST_LINES]:
        text += line[column:].strip()
        column = 0
        if text.count("(") <= text.count(")"):
            return at.file, at.function, text
    return at


_WAYS: Final = tuple((look, depth) for look in (lambda at: at, _text) for depth in (1, 2, 3, 1 + _MOST_CALLERS))
"""In what ways two posts may be alike: what is looked at, and of how many places from the innermost on."""


@lru_cache(maxsize=4096)
def _ways(post: Post) -> tuple[int, ...]:
    """Return for each of the ways a number that is equal for posts that are alike in it."""
    return tuple(hash((post.call, *map(look, post.path[:depth]))) for look, depth in _WAYS)


# What each collective asks for, and what it computes.

Tensor: TypeAlias = Any


class Contribution(NamedTuple):
    """What a rank contributes to a collective."""

    call: Call
    inputs: Sequence[Tensor] = ()  # are read
    outputs: Sequence[Tensor] = ()  # are written
    root: int = 0  # the root's rank in the group; it counts where a kind has one


def call(
    kind: str,
    tensors: Sequence[Tensor] = (),
    *,
    op: str | None = None,
    root: int | None = None,
    rows: bool = True,
    role: str = "",
) -> Call:
    """Return the call of a collective; equal ones are one object.

    Shapes and dtypes of the tensors must agree, but for sizes along axis 0 without `rows`. `root` is the root's rank in
    the job, `role` what this side is called, where sides differ.
    """
    shapes = tuple(tuple(t.shape) if rows or not t.dim() else (None, *t.shape[1:]) for t in tensors)
    dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
    return call_of_tensors(kind, shapes, dtypes, op=op, source=root, role=role)


def _sizes(asked: Call) -> list[int]:
    return [prod(size or 0 for size in shape) for shape in asked.shapes or ()]


_FOLDS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def op_name(op: Any) -> str:
    """Return the name of a reduce op, e.g. ``SUM``.

    Raises:
        NotImplementedError: it cannot be carried out.
    """
    name: str = getattr(op, "op", op).name
    if name not in _FOLDS:
        raise NotImplementedError(f"aiodist check cannot carry out ReduceOp.{name}")
    return name


def compute(members: Sequence[Contribution]) -> None:
    """Carry a collective out.

    Raises:
        ValueError: what a rank is to get is not as large as what it has for it.
    """
    kind = members[0].call.kind
    with torch.no_grad():
        results = _results(kind, members)  # before anything is written: an input may be a part of an output
        for rank, (member, values) in enumerate(zip(members, results, strict=True)):
            for number, (output, value) in enumerate(zip(member.outputs, values, strict=False)):
                if value.numel() != output.numel():
                    sent = f"rank {rank} of the group is sent, as part {number}, {list(value.shape)}"
                    raise ValueError(f"{kind}: {sent}, but expects {list(output.shape)}")
                shaped = value if value.shape == output.shape else value.reshape(output.shape)
                (output if output.is_sparse else output.detach()).copy_(shaped)  # autograd must not see the writing


def _results(kind: str, members: Sequence[Contribution]) -> Sequence[Sequence[Tensor]]:  # noqa: PLR0911  (one a kind)
    """Return what each member gets; those without outputs take nothing."""
    size, op, root = len(members), members[0].call.op or "SUM", members[0].root
    inputs = [member.inputs for member in members]
    match kind:
        case "all_reduce" | "reduce":
            return [_reduced(op, inputs)] * size
        case "reduce_scatter":  # the inputs are all ranks' first ones, then second, as are the outputs of all_gather
            reduced = _reduced(op, inputs)
            return [reduced[rank::size] for rank in range(size)]
        case "broadcast":
            return [_cloned(inputs[root])] * size
        case "scatter":
            return [[tensor] for tensor in _cloned(inputs[root])]
        case "all_gather" | "gather":
            return [_cloned(chain.from_iterable(zip(*inputs, strict=True)))] * size
        case "all_to_all":
            return [_cloned(column) for column in zip(*inputs, strict=True)]
        case _:
            return [(), _cloned(inputs[0])] if kind == MESSAGE else [()] * size  # a barrier


def _reduced(op: str, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [_reduction(op, column) for column in zip(*inputs, strict=True)]


def _reduction(op: str, column: Sequence[Tensor]) -> Tensor:
    first, *others = column
    total = reduce(torch.logical_or if op == "SUM" and first.dtype is torch.bool else _FOLDS[op], others, first.clone())
    if op != "AVG":
        return total
    whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, len(column), rounding_mode="trunc" if whole else None)


def _cloned(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


# The job.


class Collective(Slot):
    """A collective of a job's ranks, with what each contributes by position; a trace counts the bytes of `values`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.contributions = [Contribution(self.call)] * self.missing
        self.futures: list[Callable[[], object]] = []  # each gives a future its result

    @property
    def values(self) -> list[Sequence[Tensor]]:
        return [each.inputs for each in self.contributions]


class Job:
    """One run of a script's ranks.

    Attributes:
        error: why the job cannot go on; None while it can.
        collectives: how many have been completed.
    """

    def __init__(self, size: int, name: str, order: Order, on_switch: OnSwitch) -> None:
        self.size = size
        self.ranks = Ranks(size, order, on_switch, self._stuck)
        self.devices = tuple(f"CPU:{rank}" for rank in range(size))
        self.clock = time.monotonic
        self.observer = current_observer() or Observer()
        self.ledger = Ledger(range(size), OrderCheck.SIGNATURE, slot_type=Collective)
        self.error: CollectiveError | None = None
        self.collectives = 0
        self._making = self.ledger.make((self.ledger.root.key[0], NEW_GROUP, 0))
        self._walks: dict[Group, deque[list[tuple[int, ...]]]] = {}
        self._channels: dict[tuple[Group, int, int, int], Group] = {}
        self._elsewhere: dict[int, str] = {}
        self._taking_futures: set[int] = set()
        self.observer.run_begun(self, SimpleNamespace(__qualname__=name))  # type: ignore[arg-type]

    def rank(self) -> int:
        """Return the rank that calls; a process that the script has started is none."""
        rank = self.ranks.current()
        if rank is None:
            raise RuntimeError("torch.distributed is used outside of the ranks that aiodist check runs")
        return rank

    # Collectives.

    def post(self, member: Member, contribution: Contribution) -> Collective:
        """Let a member issue a collective, from where it calls.

        Raises:
            CollectiveError: the job cannot go on.
        """
        self._check()
        at, callers = _here()
        slot: Any = member.group.post(member, contribution.call, at, 0, callers)
        slot.contributions[member.position] = contribution
        self.observer.posted(member, slot)
        if slot.matched:
            self._complete(slot)
        return slot  # type: ignore[no-any-return]

    def _complete(self, slot: Collective) -> None:
        swapped = self._swapped(slot)
        if swapped:
            self._fail(slot, swapped)
            self._check()
        try:
            compute(slot.contributions)
        except Exception as error:  # noqa: BLE001  (what torch raises for these tensors, all ranks get)
            slot.error = error
        slot.group.complete(slot)
        self.collectives += 1
        self.observer.completed(slot)
        for give_result in slot.futures:
            give_result()
        slot.futures.clear()
        slot.contributions.clear()
        self.ranks.wake()

    def _swapped(self, slot: Collective) -> int:
        """Return how many calls of a group, this one the last, have been made from the same places in another order."""
        walks = self._walks.setdefault(slot.group, deque(maxlen=_MOST_SWAPPED))
        if slot.call.shapes is None or slot.call.kind == MESSAGE:
            walks.clear()  # a barrier: what came before is over
            return 0
        if slot.others is None and not walks:
            return 0
        walks.append([_ways(slot.post_of(each.position)) for each in slot.group.members])
        while walks and len(set(walks[0])) == 1:
            walks.popleft()
        for first in range(len(walks) - 2, -1, -1):
            of_members = list(zip(*[*walks][first:], strict=True))
            for each in range(len(_WAYS)):
                own = {tuple(ways[each] for ways in walk) for walk in of_members}
                if len(own) > 1 and len({tuple(sorted(walk)) for walk in own}) == 1:
                    return len(walks) - first
        return 0

    def wait(self, member: Member, slot: Collective, *, for_future: bool = False) -> None:
        """Let other ranks run until a collective is complete; for a future, at most until no other rank can go on.

        Raises:
            CollectiveError: it never will be.
            Exception: what carrying it out has raised.
        """
        self.observer.waits(member, slot)
        if not slot.complete:
            self._check()
            rank = slot.waiters[member.position] = member.replica_id
            if for_future:
                self._taking_futures.add(rank)
            member.group.consider(member)
            self._judge()
            self.ranks.wait(
                lambda: slot.complete or self.error is not None or (for_future and rank not in self._taking_futures)
            )
            slot.waiters[member.position] = None
            self._taking_futures.discard(rank)
            if not slot.complete:
                self._check()
        self.observer.resumed(member, slot)
        if slot.error is not None:
            raise slot.error.with_traceback(None)

    def wait_elsewhere(self, until: Callable[[], bool], what: str) -> None:
        """Let other ranks run until something holds that is no collective; ``what`` says what the rank does."""
        self._check()
        rank = self.rank()
        self._elsewhere[rank] = f"{what} at {shown_place(_here()[0].location)}"
        self.ranks.wait(lambda: until() or self.error is not None)
        del self._elsewhere[rank]
        if not until():
            self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise type(self.error)(self.error.report)

    def new_group(self, ranks: tuple[int, ...], name: str) -> Member | None:
        """Let this rank make a group of some ranks; return what it is in it, None where it is no member.

        All ranks of the job make it, members or not; but its members alone where torch names it by a hash of them.
        """
        self._check()
        rank, root = self.rank(), self.ledger.root
        by_all = len(name) < _LENGTH_OF_HASH
        if by_all:
            self.post(self._making.member_of(rank), Contribution(Call(f"{NEW_GROUP}({[*ranks]})")))
        if rank not in ranks:
            return None
        at, callers = _here()
        return root.new_group(root.member_of(rank), ranks, name if by_all else name[:8], at, 0, callers)

    # What ranks send each other.

    def message(
        self, member: Member, source: int, to: int, tag: int, tensors: Sequence[Tensor]
    ) -> tuple[Member, Collective]:
        """Let a member send tensors, or receive some; return what it is in a group of the two, and the message."""
        if source == to:
            raise NotImplementedError("aiodist check cannot send from a rank to itself")
        ids, key, sends = member.group.key[0], (member.group, source, to, tag), member.rank == source
        if key not in self._channels:
            name = f"messages {ids[source]}->{ids[to]}{f' tag {tag}' if tag else ''}"
            self._channels[key] = self.ledger.make(((ids[source], ids[to]), name, 0))
        end = self._channels[key].members[0 if sends else 1]
        asked = call(MESSAGE, tensors, role=f"send(dst={ids[to]})" if sends else f"recv(src={ids[source]})")
        slot = end.group.open.get(end.sequence)
        if slot is not None and _sizes(slot.call) == _sizes(asked):
            asked = replace(asked, shapes=slot.call.shapes)  # elements count, however the other side arranges them
        return end, self.post(end, Contribution(asked, tensors if sends else (), () if sends else tensors))

    # How it ends.

    def begin(self, rank: int) -> None:
        """Note that a rank begins."""
        self.observer.started(self.ledger.root.member_of(rank))

    def settle(self, rank: int) -> None:
        """Wait for what a rank has issued and not waited for: a process that ends takes it along."""
        members = self.ledger.replica_by_id[rank].members
        for member in sorted(members, key=lambda each: each.group.serial):
            for number, slot in sorted(member.group.open.items()):
                if 0 <= number < member.sequence:
                    self.wait(member, slot)  # type: ignore[arg-type]

    def end(self, rank: int, state: ReplicaState, error: BaseException | None = None) -> None:
        """Note how a rank has ended, and with what error of its own."""
        self.observer.ended(self.ledger.root.member_of(rank), state, error)
        self.ledger.end(self.ledger.replica_by_id[rank], state)
        self._judge()

    def finish(self) -> None:
        """Note that all ranks have ended: what is still open will never be complete."""
        if self.error is None and self.ledger.troubled:
            self._fail()
        self.observer.run_ended(self)

    def _judge(self) -> None:
        if self.error is None and any(not group.unsettled for group in self.ledger.troubled):
            self._fail()

    def _stuck(self) -> None:
        """Let a rank go on when none can: with a future that is not complete, or else with an error."""
        if self._taking_futures and not self.ledger.troubled:
            self._taking_futures.remove(min(self._taking_futures))
            self.ranks.wake()
        else:
            self._fail()

    def _fail(self, slot: Collective | None = None, swapped: int = 0) -> None:
        """Find why the job cannot go on; where calls have been swapped, so many, and this one the last."""
        waiting = self.ledger.stuck()
        outside = "; ".join(f"rank {rank} {what}" for rank, what in sorted(self._elsewhere.items()))
        snapshot = self.ledger.snapshot(
            self.facts(), blocked=tuple(sorted(waiting)), deadlocked=tuple(sorted({*waiting, *self._elsewhere})),
            circle=outside,
        )  # fmt: skip
        self.error = error_of(report_on(snapshot if slot is None else _only_swapped(snapshot, slot, swapped)))
        self.observer.reported(self, self.error)
        self.ranks.wake()

    def facts(self) -> list[ReplicaFacts]:
        """Return what is known of each rank beside its collectives."""
        frames = sys._current_frames()  # noqa: SLF001  (documented)
        found = []
        for replica in self.ledger.replicas:
            stack: tuple[Location, ...] = ()
            frame = frames.get(self.ranks.threads.get(replica.id, -1))
            if replica.end is None and frame is not None:
                stack = tuple(each.location for each in _places(frame))[::-1]
            waits = self._elsewhere.get(replica.id)
            found.append(ReplicaFacts(replica.id, self.devices[replica.id], replica.end, stack=stack, waits_for=waits))
        return found


def _only_swapped(snapshot: Snapshot, slot: Collective, swapped: int) -> Snapshot:
    """Return the part of a snapshot that shows which calls of a group were swapped: so many, and this one the last."""
    root = snapshot.groups[0]
    group = next(each for each in snapshot.groups if each.key == slot.group.key)
    slots = sorted((*group.history, *group.open), key=lambda each: each.number)
    first = slot.number - swapped + 1
    shown = replace(
        group,
        history=tuple(each for each in slots if each.number < first and len(each.posts) == 1),
        open=tuple(each._replace(waiting=()) for each in slots if first <= each.number <= slot.number),
    )
    groups = (shown,) if group is root else (replace(root, history=(), open=()), shown)
    facts = tuple(replace(each, stack=()) for each in snapshot.replicas)  # they are at the last call, not the first
    return replace(snapshot, order_check=OrderCheck.CALL_PATH, replicas=facts, groups=groups, blocked=(), deadlocked=())
