"""The order check of a script's ranks: what they have issued, who waits for what, and what has gone wrong.

Every call is compared by what it asks for alone; its place, and those of its callers, are noted for the report, and for
equal calls in another order. A rank gives the baton away where it waits. One that has taken a future is taken to wait
for it there and then, for what takes a future (DDP) waits for it in C++, where nobody sees it; if no rank can go on,
it gets one that is not complete.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from aiodist._checking.schedule import Order
from aiodist._core.analysis import analyse, error_of
from aiodist._core.call import MESSAGE, Call, OrderCheck, Place, Post, place
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import Observer, who_observes
from aiodist._core.ledger import Group, Ledger, Member, Slot
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupKey, GroupRecord, MemberRecord, ReplicaFacts, SlotRecord, Snapshot
from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.text import place as shown_place
from aiodist._torch.kinds import Contribution, Tensor, call, compute
from aiodist._torch.private import torch
from aiodist._torch.ranks import OnSwitch, Ranks
from aiodist._torch.report import NEW_GROUP, PlaceOrder, in_ranks, report_on_swap

_PLUMBING = tuple(
    f"{Path(module.__file__ or '').resolve().parent}{os.sep}" for module in (torch, sys.modules["aiodist"], os)
)
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
_DECORATORS = f"{os.sep}typing_extensions.py"  # which marks torch's deprecated functions
_MOST_CALLERS = 8
_LENGTH_OF_HASH = 32  # which torch names groups by that their members alone make

Sites: TypeAlias = tuple[Place, tuple[Any, ...]]
"""A call's place, and those of its callers, each with an offset of 0, as the ledger has it."""


@cache
def is_plumbing(file: str) -> bool:
    """Return whether a file is torch's, the standard library's or ours, not the program's."""
    own = file.startswith(_PLUMBING) and not (_SITE_PACKAGES in file and not file.startswith(_PLUMBING[:2]))
    return own or file.startswith("<frozen") or file.endswith(_DECORATORS)


_sites: dict[Sites, Sites] = {}


def _frames(frame: Any) -> Iterator[Any]:
    """Yield the program's own frames, from the innermost outward."""
    while frame is not None:
        if not is_plumbing(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _here() -> Sites:
    """Return the places of the call that goes on, and of its callers."""
    found: list[Any] = []
    for frame in _frames(sys._getframe(2)):  # noqa: SLF001  (what every profiler uses)
        found += (place(frame.f_code, frame.f_lasti), 0)
        if len(found) == 2 * _MOST_CALLERS:
            break
    first, _, *callers = found or (Place("<unknown>", 1, None, "?"), 0)
    sites = first, tuple(callers)
    return _sites.setdefault(sites, sites)


class Collective(Slot):
    """A collective of a job's ranks: by position what each contributes; None before it has come."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.contributions: list[Contribution | None] = [None] * self.missing
        self.on_complete: list[Callable[[], object]] = []

    @property
    def values(self) -> list[Sequence[Tensor]]:
        """By position, the inputs of members that have come; a trace counts their bytes."""
        return [() if each is None else each.inputs for each in self.contributions]


@dataclass(slots=True)
class Pending:
    """A collective that a member issued; of a receive from anybody, None until there is a message, from `source`."""

    member: Member
    slot: Collective | None
    source: int = -1


class Job:
    """One run of a script's ranks.

    Attributes:
        error: why the job cannot go on; None while it can.
        stores: what ranks have stored, by what they know the store by.
        kept: what C++ calls back, and which must be there as long as the job.
        collectives: how many have been completed.
    """

    def __init__(self, size: int, name: str, order: Order, on_switch: OnSwitch) -> None:
        self.size = size
        self.ranks = Ranks(size, order, on_switch, self._stuck)
        self.devices = tuple(f"CPU:{rank}" for rank in range(size))
        self.clock = time.monotonic
        self.observer = who_observes() or Observer()
        self.ledger = Ledger(range(size), OrderCheck.SIGNATURE, slot_type=Collective)
        self.error: CollectiveError | None = None
        self.stores: dict[str, dict[str, bytes]] = {}
        self.kept: list[Any] = []
        self.collectives = 0
        self._orders: dict[Group, PlaceOrder] = {}
        self._swapped: tuple[GroupKey, int, int] | None = None
        self._made: list[list[Post]] = [[] for _ in range(size)]
        self._future_waits: set[int] = set()
        self._channels: dict[tuple[Group, int, int, int], Group] = {}
        self._any_source: list[tuple[tuple[Group, int, int], Callable[[int], None]]] = []
        self._elsewhere: dict[int, str] = {}
        self.observer.run_begun(self, SimpleNamespace(__qualname__=name))  # type: ignore[arg-type]

    def rank(self) -> int:
        """Return the rank that calls; a process that the script has started is none."""
        rank = self.ranks.current()
        if rank is None:
            raise RuntimeError("torch.distributed is used outside of the ranks that aiodist check runs")
        return rank

    # Collectives.

    def post(self, member: Member, contribution: Contribution, sites: Sites | None = None) -> Pending:
        """Let a member issue a collective, from where it calls if nothing else is said.

        Raises:
            CollectiveError: the job cannot go on.
        """
        self._check()
        group, sites = member.group, sites or _here()
        self._check_order(member, contribution.call, sites)
        slot = group.post(member, contribution.call, sites[0], 0, sites[1])
        assert isinstance(slot, Collective)
        slot.contributions[member.position] = contribution
        self.observer.posted(member, slot)
        if slot.matched:
            self._complete(slot)
        return Pending(member, slot)

    def _check_order(self, member: Member, asked: Call, sites: Sites) -> None:
        """Before the last member comes to a collective: doom it where the same places came in another order."""
        group = member.group
        slot = group.open.get(member.sequence)
        if asked.shapes is None:  # a barrier: what came before is over
            self._orders.pop(group, None)
        elif isinstance(slot, Collective) and slot.missing == 1 and slot.call is asked and asked.kind != MESSAGE:
            came = [slot.raw_post_of(position)[1::2] for position in range(len(group.members))]
            came[member.position] = sites
            swapped = self._orders.setdefault(group, PlaceOrder()).swapped(asked, came)
            if swapped and group.doomed is None:
                self._swapped = group.key, slot.number - swapped + 1, slot.number
                group.doom(slot.number)

    def _complete(self, slot: Collective) -> None:
        try:
            compute([each for each in slot.contributions if each is not None])
        except Exception as error:  # noqa: BLE001  (what torch raises for these tensors, all ranks get)
            slot.error = error
        slot.group.complete(slot)
        self.collectives += 1
        self.observer.completed(slot)
        slot.contributions.clear()
        self.ranks.wake()
        for call_back in slot.on_complete:
            call_back()

    def wait(self, pending: Pending, *, for_future: bool = False) -> Collective:
        """Let other ranks run until a collective is complete; for a future, until no other rank can go on.

        Raises:
            CollectiveError: it never will be.
            Exception: what carrying it out has raised.
        """
        if pending.slot is None:
            self.wait_elsewhere(lambda: pending.slot is not None, "waits for a message of any rank")
        member, slot = pending.member, pending.slot
        assert slot is not None
        self.observer.waits(member, slot)
        if not slot.complete:
            self._wait(member, slot, for_future=for_future)
        self.observer.resumed(member, slot)
        if slot.error is not None:
            raise slot.error.with_traceback(None)
        return slot

    def _wait(self, member: Member, slot: Collective, *, for_future: bool) -> None:
        self._check()
        rank = member.replica_id
        slot.waiters[member.position] = rank
        member.group.consider(member)
        if for_future:
            self._future_waits.add(rank)
        self._judge()

        def over() -> bool:
            return slot.complete or self.error is not None or (for_future and rank not in self._future_waits)

        self.ranks.wait(over)
        slot.waiters[member.position] = None
        self._future_waits.discard(rank)
        if not slot.complete:
            self._check()

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

    def new_group(self, ranks: tuple[int, ...], name: str, *, by_all: bool = True) -> Member | None:
        """Let this rank make a group of some ranks; return what it is in it, None where it is no member.

        Either all ranks of the job make it, as with ``new_group``, or its members alone, as with ``split_group``.
        """
        self._check()
        rank, root, sites = self.rank(), self.ledger.root, _here()
        if by_all:
            self._made[rank].append(Post(Call(NEW_GROUP, members=ranks), sites[:1]))
        if rank not in ranks:
            return None
        shown_name = name if len(name) < _LENGTH_OF_HASH else name[:8]
        return root.new_group(root.member_of(rank), ranks, shown_name, sites[0], 0, sites[1])

    # What ranks send each other.

    def send(self, member: Member, to: int, tag: int, tensors: Sequence[Tensor]) -> Pending:
        """Let a member send tensors to the one of that rank."""
        end = self._channel(member.group, member.rank, to, tag).members[0]
        asked = call(MESSAGE, tensors, role=f"send(dst={member.group.key[0][to]})")
        pending = self.post(end, Contribution(asked, inputs=tensors))
        self._bind_any_source()
        return pending

    def receive(
        self, member: Member, source: int, tag: int, tensors: Sequence[Tensor], sites: Sites | None = None
    ) -> Pending:
        """Let a member receive tensors from the one of that rank."""
        end = self._channel(member.group, source, member.rank, tag).members[1]
        asked = call(MESSAGE, tensors, role=f"recv(src={member.group.key[0][source]})")
        return self.post(end, Contribution(asked, outputs=tensors), sites)

    def receive_any(self, member: Member, tag: int, tensors: Sequence[Tensor]) -> Pending:
        """Let a member receive tensors from whoever sends some."""
        pending, sites = Pending(member, None), _here()

        def receive_from(source: int) -> None:
            found = self.receive(member, source, tag, tensors, sites)
            pending.member, pending.slot, pending.source = found.member, found.slot, source

        self._any_source.append(((member.group, member.rank, tag), receive_from))
        self._bind_any_source()
        return pending

    def _bind_any_source(self) -> None:
        """Give receives from anybody, the oldest first, the messages that are there."""
        for waiting in [*self._any_source]:
            wanted, receive_from = waiting
            for (group, source, to, tag), channel in self._channels.items():
                sent, received = (end.sequence for end in channel.members)
                if wanted == (group, to, tag) and sent > received:
                    self._any_source.remove(waiting)
                    receive_from(source)
                    self.ranks.wake()
                    break

    def _channel(self, group: Group, source: int, to: int, tag: int) -> Group:
        if source == to:
            raise NotImplementedError("aiodist check cannot send from a rank to itself")
        key = group, source, to, tag
        if key not in self._channels:
            ids = group.key[0]
            tagged = f" tag {tag}" if tag else ""
            name = f"send {ids[source]}->{ids[to]}{tagged}"
            self._channels[key] = self.ledger.channel(ids[source], ids[to], name)
        return self._channels[key]

    # How it ends.

    def begin(self, rank: int) -> None:
        """Note that a rank begins."""
        self.observer.started(self.ledger.root.member_of(rank))

    def settle(self, rank: int) -> None:
        """Wait for what a rank has issued and not waited for: a process that ends takes it along."""
        members = self.ledger.replica_by_id[rank].members
        for member in sorted(members, key=lambda each: each.group.serial):
            for number, slot in sorted(member.group.open.items()):
                if 0 <= number < member.sequence and isinstance(slot, Collective):
                    self.wait(Pending(member, slot))

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

    def _stuck(self) -> None:
        """Let some rank go on when none can: with a future that is not complete, or with an error."""
        if self._future_waits and not self.ledger.troubled:
            self._future_waits.remove(min(self._future_waits))
            self.ranks.wake()
        else:
            self._fail()

    def _judge(self) -> None:
        if self.error is None and any(not group.unsettled for group in self.ledger.troubled):
            self._fail()

    def _fail(self) -> None:
        waiting = self.ledger.stuck()
        outside = "; ".join(f"replica {rank} {what}" for rank, what in sorted(self._elsewhere.items()))
        blocked = tuple(sorted(waiting))
        snapshot = self.ledger.snapshot(
            self.facts(), blocked=blocked, deadlocked=tuple(sorted({*waiting, *self._elsewhere})), circle=outside
        )
        if self._swapped is not None:
            key, first, last = self._swapped
            report = report_on_swap(snapshot, next(each for each in snapshot.groups if each.key == key), first, last)
        else:
            report = analyse(snapshot)
        if report.reason in (Reason.CYCLE, Reason.EXITED):
            report = self._made_otherwise() or report
        self.error = error_of(in_ranks(report))
        self.observer.reported(self, self.error)
        self.ranks.wake()

    def _made_otherwise(self) -> CollectiveReport | None:
        """Return the report on ranks that have made groups in other orders, where such groups wait for members."""
        unmade = Counter(group.key[0] for group in self.ledger.groups() if -1 in group.open)
        if max(unmade.values(), default=0) < 2:
            return None
        slots: list[SlotRecord] = []
        for posts in zip_longest(*self._made):
            there = {post: tuple(rank for rank in range(self.size) if posts[rank] == post) for post in posts if post}
            slots.append(SlotRecord(len(slots), tuple(there.items())))
            if len(set(posts)) > 1:
                break
        else:
            return None
        root = replace(self.ledger.root.record(), history=(), open=())
        members = tuple(MemberRecord(rank, len(made)) for rank, made in enumerate(self._made))
        making = GroupRecord((root.key[0], NEW_GROUP, 0), None, members, tuple(slots[:-1]), (slots[-1],))
        report = analyse(Snapshot(OrderCheck.SIGNATURE, tuple(self.facts()), (root, making)))
        return replace(report, reason=Reason.GROUP)

    def facts(self) -> list[ReplicaFacts]:
        """Return what is known of each rank beside its collectives."""
        frames = sys._current_frames()  # noqa: SLF001  (documented)
        found = []
        for replica in self.ledger.replicas:
            stack: tuple[Location, ...] = ()
            frame = frames.get(self.ranks.threads.get(replica.id, -1))
            if replica.end is None and frame is not None:
                stack = tuple(_location(each) for each in _frames(frame))[::-1]
            waits = self._elsewhere.get(replica.id)
            found.append(ReplicaFacts(replica.id, self.devices[replica.id], replica.end, stack=stack, waits_for=waits))
        return found


def _location(frame: Any) -> Location:
    return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname.rpartition(".<locals>.")[2])
