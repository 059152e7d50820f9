"""A job: what a script's ranks have issued, who waits for what, and why the job cannot continue.

Every call is compared by what it asks for alone. A collective is carried out once every rank has issued it.

A rank that takes a future counts as waiting for it at once, because what takes one (DDP) waits for it in C++, where
other ranks cannot run. If no rank can continue, it gets a future that is not complete.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from aiodist._checking.schedule import Order
from aiodist._core.analysis import error_of
from aiodist._core.call import MESSAGE, Call, OrderCheck
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import Observer, current_observer
from aiodist._core.ledger import Group, Ledger, Member, Slot
from aiodist._core.snapshot import ReplicaFacts
from aiodist._core.terms import Location, ReplicaState
from aiodist._core.text import place
from aiodist._torch.collectives import Tensors, call_on, compute
from aiodist._torch.places import SwappedCalls, call_sites, only_swapped, places_of
from aiodist._torch.ranks import OnSwitch, Ranks
from aiodist._torch.report import NEW_GROUP, report_on

_LENGTH_OF_HASH = 32
"""The length of the names that torch gives to groups that only their members make: a hash."""


class Collective(Slot):
    """A collective of a job's ranks.

    Attributes:
        values: by position, the tensors that a rank passes; a trace counts their bytes.
        outputs: by position, the tensors in which it receives the result.
        futures: functions that give futures their results.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.values: list[Tensors] = [()] * self.missing
        self.outputs: list[Tensors] = [()] * self.missing
        self.futures: list[Callable[[], object]] = []


class Job:
    """One run of a script's ranks.

    Attributes:
        error: why the job cannot continue; None while it can.
        errors: by rank, its own error or the job's, with which it has ended.
        collectives: how many have been completed.
    """

    def __init__(self, size: int, name: str, order: Order, on_switch: OnSwitch) -> None:
        self.size = size
        self.ranks = Ranks(size, order, on_switch, self._wake_or_fail, self._end_idle)
        self.devices = tuple(f"CPU:{rank}" for rank in range(size))
        self.clock = time.monotonic
        self.observer = current_observer() or Observer()
        self.ledger = Ledger(range(size), OrderCheck.SIGNATURE, slot_type=Collective)
        self.error: CollectiveError | None = None
        self.errors: dict[int, BaseException] = {}
        self.collectives = 0
        self._new_groups = self.ledger.make((self.ledger.root.key[0], NEW_GROUP, 0))
        self._swapped = SwappedCalls()
        self._channels: dict[tuple[Group, int, int, int], Group] = {}
        self._waits_elsewhere: dict[int, str] = {}
        self._takes_future: set[int] = set()
        self.observer.run_begun(self, name)

    def run(self, main: Callable[[int], object], seconds: float) -> bool:
        """Call a function for every rank; return whether all have ended in time."""
        if not self.ranks.run(partial(self._run_rank, main), seconds):
            return False
        if self.error is None and self.ledger.doomed_groups:
            self._fail()
        self.observer.run_ended(self)
        return True

    def _run_rank(self, main: Callable[[int], object], rank: int) -> None:
        member, state = self.ledger.root.member_of(rank), ReplicaState.EXITED
        self.observer.started(member)
        try:
            main(rank)
            self._wait_for_all(rank)
        except BaseException as error:  # noqa: BLE001  (whatever it is, the rank has ended with it)
            self.errors[rank], state = error, ReplicaState.FAILED
        self.observer.ended(member, state, self.errors.get(rank))
        self.ledger.end(member.replica, state)
        self._fail_if_settled()

    def _wait_for_all(self, rank: int) -> None:
        """Wait for what a rank has issued and not waited for, which would end with its process."""
        members = self.ledger.replica_by_id[rank].members
        for member in sorted(members, key=lambda each: each.group.serial):
            for number, slot in sorted(member.group.open.items()):
                if 0 <= number < member.sequence:
                    self.wait(member, slot)  # type: ignore[arg-type]

    def rank(self) -> int:
        """Return the rank that calls; a RuntimeError in a process that the script has started."""
        rank = self.ranks.current()
        if rank is None:
            raise RuntimeError("torch.distributed is used outside of the ranks that aiodist check runs")
        return rank

    # Collectives.

    def post(self, member: Member, call: Call, inputs: Tensors = (), outputs: Tensors = ()) -> Collective:
        """Issue a collective, with the tensors that a member passes, and those in which it receives the result."""
        self.rank()
        self._raise_error()
        at, callers = call_sites()
        slot: Any = member.group.post(member, call, at, 0, callers)
        slot.values[member.position], slot.outputs[member.position] = inputs, outputs
        self.observer.posted(member, slot)
        if slot.matched:
            self._complete(slot)
        return slot  # type: ignore[no-any-return]

    def _complete(self, slot: Collective) -> None:
        first = self._swapped.first(slot)
        if first is not None:
            self._fail(slot, first)
            self._raise_error()
        root = 0 if slot.call.source is None else slot.group.key[0].index(slot.call.source)
        try:
            compute(slot.call, root, slot.values, slot.outputs)
        except Exception as error:  # noqa: BLE001  (torch's error about these tensors, which all ranks get)
            slot.error = error
        slot.group.complete(slot)
        self.collectives += 1
        self.observer.completed(slot)
        for set_result in slot.futures:
            set_result()
        for each in (slot.futures, slot.values, slot.outputs):
            each.clear()
        self.ranks.wake()

    def wait(self, member: Member, slot: Collective, *, for_future: bool = False) -> None:
        """Wait for a collective, and raise its error; for a future, wait at most until no other rank can continue."""
        self.observer.waits(member, slot)
        if not slot.complete:
            self._raise_error()
            rank = slot.waiters[member.position] = member.replica_id
            if for_future:
                self._takes_future.add(rank)
            member.group.update_settled(member)
            self._fail_if_settled()
            self.ranks.wait(
                lambda: slot.complete or self.error is not None or (for_future and rank not in self._takes_future)
            )
            slot.waiters[member.position] = None
            self._takes_future.discard(rank)
            if not slot.complete:
                self._raise_error()
        self.observer.resumed(member, slot)
        if slot.error is not None:
            raise slot.error.with_traceback(None)

    def wait_elsewhere(self, until: Callable[[], bool], what: str) -> None:
        """Wait for something that is no collective; ``what`` says what the rank does."""
        self._raise_error()
        rank = self.rank()
        self._waits_elsewhere[rank] = f"{what} at {place(call_sites()[0].location)}"
        self.ranks.wait(lambda: until() or self.error is not None)
        del self._waits_elsewhere[rank]
        if not until():
            self._raise_error()

    def new_group(self, ranks: tuple[int, ...], name: str) -> Member | None:
        """Make a group of some ranks; return this rank's member of it, or None.

        All ranks of the job make it, or only its members where torch names it by a hash of them.
        """
        self._raise_error()
        rank, root = self.rank(), self.ledger.root
        by_all = len(name) < _LENGTH_OF_HASH
        if by_all:
            self.post(self._new_groups.member_of(rank), Call(f"{NEW_GROUP}({[*ranks]})"))
        if rank not in ranks:
            return None
        at, callers = call_sites()
        return root.new_group(root.member_of(rank), ranks, name if by_all else name[:8], at, 0, callers)

    def message(self, member: Member, source: int, to: int, tag: int, tensors: Tensors) -> tuple[Member, Collective]:
        """Send tensors from a member, or receive some; return the message, with the rank's member in a group of two."""
        if source == to:
            raise NotImplementedError("aiodist check cannot send from a rank to itself")
        ids, key, sends = member.group.key[0], (member.group, source, to, tag), member.rank == source
        if key not in self._channels:
            name = f"messages {ids[source]}->{ids[to]}{f' tag {tag}' if tag else ''}"
            self._channels[key] = self.ledger.make(((ids[source], ids[to]), name, 0))
        end = self._channels[key].members[0 if sends else 1]
        call = call_on(tensors, MESSAGE, role=f"send(dst={ids[to]})" if sends else f"recv(src={ids[source]})")
        slot = end.group.open.get(end.sequence)
        if slot is not None and _sizes(slot.call) == _sizes(call):
            call = replace(call, shapes=slot.call.shapes)  # elements count, however the other side arranges them
        return end, self.post(end, call, tensors if sends else (), () if sends else tensors)

    # Errors.

    def _raise_error(self) -> None:
        if self.error is not None:
            raise type(self.error)(self.error.report)

    def _fail_if_settled(self) -> None:
        if self.error is None and any(not group.unsettled for group in self.ledger.doomed_groups):
            self._fail()

    def _wake_or_fail(self) -> None:
        """Wake a rank when none can continue: with a future that is not complete, or else with an error."""
        if self._takes_future and not self.ledger.doomed_groups:
            self._takes_future.remove(min(self._takes_future))
            self.ranks.wake()
        else:
            self._fail()

    def _end_idle(self) -> None:
        """End a rank that only sleeps and polls, if the job has failed."""
        if self.error is None and self.ledger.doomed_groups:
            self._fail()
        self._raise_error()
        if self.errors:
            raise SystemExit  # as torchrun ends the other processes

    def _fail(self, slot: Collective | None = None, first: int = 0) -> None:
        """Find out why the job cannot continue; if calls are swapped, these are those from ``first`` to ``slot``."""
        waiting, elsewhere = self.ledger.stuck(), self._waits_elsewhere
        snapshot = self.ledger.snapshot(
            self.facts(), blocked=tuple(sorted(waiting)), deadlocked=tuple(sorted({*waiting, *elsewhere})),
            cycle_text="; ".join(f"rank {rank} {what}" for rank, what in sorted(elsewhere.items())),
        )  # fmt: skip
        self.error = error_of(report_on(snapshot if slot is None else only_swapped(snapshot, slot, first)))
        self.observer.reported(self, self.error)
        self.ranks.wake()

    def facts(self) -> list[ReplicaFacts]:
        """Return what is known of each rank besides its collectives."""
        frames = sys._current_frames()  # noqa: SLF001  (documented)
        found = []
        for replica in self.ledger.replicas:
            stack: tuple[Location, ...] = ()
            frame = frames.get(self.ranks.threads.get(replica.id, -1))
            if replica.end is None and frame is not None:
                stack = tuple(each.location for each in places_of(frame))[::-1]
            waits = self._waits_elsewhere.get(replica.id)
            found.append(ReplicaFacts(replica.id, self.devices[replica.id], replica.end, stack=stack, waits_for=waits))
        return found


def _sizes(call: Call) -> list[int]:
    return [prod(size or 0 for size in shape) for shape in call.shapes or ()]
