"""Process groups whose collectives are posted to the order check, and carried out once all ranks have come.

A `Job` is the world of one run: its ledger, its ranks, and what has gone wrong. Every call is compared by what it asks
for alone; its place, and those of its callers, are noted for the report. A rank gives the baton away where it waits:
in a call that is not asynchronous, in `Work.wait`, and in `Work.get_future`, for what takes a future (DDP) waits for it
in C++, where nobody sees it. If no rank can go on, and one waits for a future, it gets one that is not complete.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from aiodist._core.analysis import analyse, error_of
from aiodist._core.call import MESSAGE, Call, OrderCheck, Place, place
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import who_observes
from aiodist._core.ledger import Group, Ledger, Member, Slot
from aiodist._core.report import Location, ReplicaState
from aiodist._core.snapshot import ReplicaFacts
from aiodist._core.text import place as shown_place
from aiodist._torch import private
from aiodist._torch.kinds import Contribution, Tensor, call, check_op, compute, op_name, parts
from aiodist._torch.private import bindings, c10d, torch
from aiodist._torch.ranks import Ranks, Signal

_PLUMBING = tuple(
    f"{Path(module.__file__ or '').resolve().parent}{os.sep}" for module in (torch, sys.modules["aiodist"], os)
)
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
_MOST_CALLERS = 8
_MOST_SWAPPED = 8
"""Over how many calls of a group the order of places is compared."""

Sites: TypeAlias = tuple[tuple[Place, int], ...]


def is_plumbing(file: str) -> bool:
    """Return whether a file is torch's, the standard library's or ours, not the program's."""
    own = file.startswith(_PLUMBING) and not (_SITE_PACKAGES in file and not file.startswith(_PLUMBING[:2]))
    return own or file.startswith("<frozen")


_plumbing: dict[str, bool] = {}
_sites: dict[Sites, Sites] = {}


def _frames(frame: Any) -> Iterator[Any]:
    """Yield the program's own frames, from the innermost outward."""
    while frame is not None:
        file = frame.f_code.co_filename
        plumbing = _plumbing.get(file)
        if plumbing is None:
            plumbing = _plumbing[file] = is_plumbing(file)
        if not plumbing:
            yield frame
        frame = frame.f_back


def _here() -> Sites:
    """Return the places of the call that goes on, and of its callers."""
    found = []
    for frame in _frames(sys._getframe(2)):  # noqa: SLF001  (what every profiler uses)
        found.append((place(frame.f_code, frame.f_lasti), 0))
        if len(found) == _MOST_CALLERS:
            break
    sites = tuple(found) or ((Place("<unknown>", 1, None, "?"), 0),)
    return _sites.setdefault(sites, sites)


class Collective(Slot):
    """A collective of a job's ranks: what they bring, and who waits for it.

    Attributes:
        brought: what each member brings, by position.
        signal: what its waiters wait for.
        futures: what is to have its outputs once it is complete.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.brought: list[Contribution | None] = [None] * self.missing
        self.signal = Signal()
        self.futures: list[Callable[[], object]] = []

    @property
    def values(self) -> list[Sequence[Tensor]]:
        """By position, what members that have come bring; what a trace measures."""
        return [() if each is None else each.inputs for each in self.brought]


class _PlaceOrder:
    """Finds that a group's members have been at the same places in another order, with calls that ask for the same.

    Places alone say nothing: one rank may publish what others receive elsewhere. But where places differ, and a few
    calls later all members have been at the same ones with the same calls, each in an order of its own, values of
    different calls have met.
    """

    def __init__(self) -> None:
        self._since: list[list[tuple[Call, Sites]]] = []

    def differs(self, asked: Call, sites: Sequence[Sites]) -> bool:
        """Note the next call of a group; return whether it completes the same places in another order.

        Args:
            asked: what all its members ask for.
            sites: from where, by position.
        """
        if len(set(sites)) == 1 and (not self._since or self._since[0][0][0] is not asked):
            self._since.clear()
            return False
        if len(self._since) == _MOST_SWAPPED:
            del self._since[0]
        self._since.append([(asked, each) for each in sites])
        return any(self._reordered(first) for first in range(len(self._since) - 1))

    def _reordered(self, first: int) -> bool:
        walks = list(zip(*self._since[first:], strict=True))
        return len(set(walks)) > 1 and len({frozenset(Counter(walk).items()) for walk in walks}) == 1


class Job:
    """One run of a script's ranks.

    Args:
        size: how many there are.
        name: the script's.

    Attributes:
        size: how many ranks there are.
        ranks: the ranks.
        ledger: the order check.
        error: why the job cannot go on; None while it can.
        worlds: what `torch.distributed` knows of each rank's groups.
        stores: what ranks have stored, by what they know the store by.
        kept: what C++ calls back, and which must be there as long as the job.
        collectives: how many have been completed.
    """

    def __init__(self, size: int, name: str) -> None:
        self.ranks: Ranks
        self.size = size
        self.devices = tuple(f"CPU:{rank}" for rank in range(size))
        self.clock = time.monotonic
        self.observer = who_observes()
        self._orders: dict[Group, _PlaceOrder] = {}
        self._reordered = False
        self.ledger = Ledger(range(size), OrderCheck.SIGNATURE, slot_type=Collective)
        self.error: CollectiveError | None = None
        self.worlds = [private.World() for _ in range(size)]
        self.stores: dict[str, dict[str, bytes]] = {}
        self.kept: list[Any] = []
        self.store_signal = Signal()
        self.collectives = 0
        self._future_waits: dict[int, Collective] = {}
        self._channels: dict[tuple[Group, int, int, int], Group] = {}
        self._any_source: list[_AnySource] = []
        self._elsewhere: dict[int, str] = {}
        if self.observer is not None:
            self.observer.run_begun(self, SimpleNamespace(__qualname__=name))  # type: ignore[arg-type]

    def rank(self) -> int:
        """Return the rank that calls.

        Raises:
            RuntimeError: it is none, for example a process that the script has started.
        """
        rank = self.ranks.current()
        if rank is None:
            raise RuntimeError("torch.distributed is used outside of the ranks that aiodist check runs")
        return rank

    def world(self) -> private.World:
        """Return what `torch.distributed` knows of the calling rank's groups."""
        return self.worlds[self.rank()]

    # Collectives.

    def post(self, group: Group, member: Member, contribution: Contribution) -> Collective:
        """Let a member issue a collective.

        Raises:
            CollectiveError: the job cannot go on.
        """
        self._check()
        sites = _here()
        self._check_order(group, member, contribution.call, sites)
        slot = group.post(member, contribution.call, sites[0][0], 0, sites)
        assert isinstance(slot, Collective)
        slot.brought[member.position] = contribution
        if self.observer is not None:
            self.observer.posted(member, slot)
        if slot.matched:
            self._complete(group, slot)
        return slot

    def _check_order(self, group: Group, member: Member, asked: Call, sites: Sites) -> None:
        """Before the last member comes to a collective: doom it where the same places came in another order."""
        slot = group.open.get(member.sequence)
        if asked.shapes is None:  # a barrier: what came before is over
            self._orders.pop(group, None)
        if slot is None or slot.missing != 1 or slot.call is not asked or asked.shapes is None or asked.kind == MESSAGE:
            return
        order = self._orders.setdefault(group, _PlaceOrder())
        others = slot.others or {}
        came = [others[each][3] if each in others else slot.path for each in range(len(group.members))]
        came[member.position] = sites
        if order.differs(asked, [each or () for each in came]):
            self._reordered = True
            group.doom(slot.number)

    def _complete(self, group: Group, slot: Collective) -> None:
        try:
            compute([each for each in slot.brought if each is not None])
        except Exception as error:  # noqa: BLE001  (what torch raises for these tensors, all ranks get)
            slot.error = error
        group.complete(slot)
        self.collectives += 1
        if self.observer is not None:
            self.observer.completed(slot)
        slot.brought.clear()
        self.ranks.notify(slot.signal)
        for fulfil in slot.futures:
            fulfil()

    def wait(self, member: Member, slot: Collective, *, for_future: bool = False) -> None:
        """Let other ranks run until a collective is complete.

        Args:
            member: who waits.
            slot: the collective.
            for_future: whether it is enough to have come so far that no other rank can go on.

        Raises:
            CollectiveError: it never will be.
            Exception: what carrying it out has raised.
        """
        if self.observer is not None:
            self.observer.waits(member, slot)
        if not slot.complete:
            self._wait(member, slot, for_future=for_future)
        if self.observer is not None:
            self.observer.resumed(member, slot)
        if slot.error is not None:
            raise slot.error.with_traceback(None)

    def _wait(self, member: Member, slot: Collective, *, for_future: bool) -> None:
        self._check()
        rank = member.replica_id
        slot.waiters[member.position] = rank
        member.group.consider(member)
        if for_future:
            self._future_waits[rank] = slot
        self._judge()

        def over() -> bool:
            return slot.complete or self.error is not None or (for_future and rank not in self._future_waits)

        self.ranks.wait(slot.signal, over)
        slot.waiters[member.position] = None
        self._future_waits.pop(rank, None)
        if not slot.complete:
            self._check()

    def wait_elsewhere(self, signal: Signal, until: Callable[[], bool], what: str) -> None:
        """Let other ranks run until something holds that is no collective.

        Args:
            signal: what notifies those who wait for it.
            until: whether it holds.
            what: the same in words, e.g. ``waits for key 'x' of the store``.
        """
        self._check()
        rank = self.rank()
        self._elsewhere[rank] = f"{what} at {shown_place(_here()[0][0].location)}"
        self.ranks.wait(signal, lambda: until() or self.error is not None)
        del self._elsewhere[rank]
        if not until():
            self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise type(self.error)(self.error.report)

    def new_group(self, rank: int, ranks: tuple[int, ...], name: str) -> Member:
        """Let a rank make a group of some ranks; return what it is in it."""
        self._check()
        root = self.ledger.root
        sites = _here()
        return root.new_group(root.member_of(rank), ranks, name, sites[0][0], 0, sites)

    # What ranks send each other.

    def send(self, group: Group, member: Member, to: int, tag: int, tensors: Sequence[Tensor]) -> _Pending:
        """Let a member send tensors to the one of that rank; return who waits for what."""
        ids = group.key[0]
        channel = self._channel(group, member.rank, to, tag)
        end = channel.members[0]
        asked = call(MESSAGE, tensors, role=f"send(dst={ids[to]})")
        slot = self.post(channel, end, Contribution(asked, inputs=tensors))
        for waiting in self._any_source:
            if waiting.matches(group, to, tag):
                waiting.bind(self, member.rank)
                break
        return end, slot

    def receive(self, group: Group, member: Member, source: int, tag: int, tensors: Sequence[Tensor]) -> _Pending:
        """Let a member receive tensors from the one of that rank; return who waits for what."""
        channel = self._channel(group, source, member.rank, tag)
        end = channel.members[1]
        asked = call(MESSAGE, tensors, role=f"recv(src={group.key[0][source]})")
        return end, self.post(channel, end, Contribution(asked, outputs=tensors))

    def receive_any(self, group: Group, member: Member, tag: int, tensors: Sequence[Tensor]) -> _AnySource:
        """Let a member receive tensors from whoever sends some."""
        waiting = _AnySource(group, member, tag, tensors)
        for (of, source, to, its_tag), channel in self._channels.items():
            sent, received = (end.sequence for end in channel.members)
            if waiting.matches(of, to, its_tag) and sent > received:
                waiting.bind(self, source)
                return waiting
        self._any_source.append(waiting)
        return waiting

    def forget(self, waiting: _AnySource) -> None:
        """Note that a receive has its sender."""
        if waiting in self._any_source:
            self._any_source.remove(waiting)

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

    def settle(self, rank: int) -> None:
        """Wait for what a rank has issued and not waited for: a process that ends takes it along."""
        members = self.ledger.replica_by_id[rank].members
        for member in sorted(members, key=lambda each: each.group.serial):
            for number, slot in sorted(member.group.open.items()):
                if 0 <= number < member.sequence and isinstance(slot, Collective):
                    self.wait(member, slot)

    def begin(self, rank: int) -> None:
        """Note that a rank begins."""
        if self.observer is not None:
            self.observer.started(self.ledger.root.member_of(rank))

    def end(self, rank: int, state: ReplicaState, error: BaseException | None = None) -> None:
        """Note how a rank has ended, and with what error of its own."""
        if self.observer is not None:
            self.observer.ended(self.ledger.root.member_of(rank), state, error)
        self.ledger.end(self.ledger.replica_by_id[rank], state)
        self._judge()

    def finish(self) -> None:
        """Note that all ranks have ended: what is still open will never be complete."""
        if self.error is None and self.ledger.troubled:
            self._fail()
        if self.observer is not None:
            self.observer.run_ended(self)

    def stuck(self) -> None:
        """Let some rank go on when none can: with a future that is not complete, or with an error."""
        if self._future_waits and not self.ledger.troubled:
            slot = self._future_waits.pop(min(self._future_waits))
            self.ranks.notify(slot.signal)
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
        if self._reordered:
            snapshot = replace(snapshot, order_check=OrderCheck.CALL_PATH)
        self.error = error_of(analyse(snapshot))
        if self.observer is not None:
            self.observer.reported(self, self.error)
        self.ranks.notify_all()

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


_Pending: TypeAlias = tuple[Member, Collective]


class _AnySource:
    """A receive from whoever sends."""

    def __init__(self, group: Group, member: Member, tag: int, tensors: Sequence[Tensor]) -> None:
        self._group = group
        self._member = member
        self._tag = tag
        self._tensors = tensors
        self.signal = Signal()
        self.source: int | None = None
        self.pending: _Pending | None = None

    def matches(self, group: Group, to: int, tag: int) -> bool:
        """Return whether a message to that rank is one that it takes."""
        return group is self._group and to == self._member.rank and tag == self._tag

    def bind(self, job: Job, source: int) -> None:
        """Take the next message of a rank."""
        job.forget(self)
        self.source = source
        self.pending = job.receive(self._group, self._member, source, self._tag, self._tensors)
        job.ranks.notify(self.signal)


# What torch sees.


class RankFuture(torch.futures.Future):  # type: ignore[misc]
    """The future of a collective; a rank that waits for it lets others run."""

    pending: tuple[Job, Member, Collective]

    def wait(self) -> Any:
        """Return the outputs once they are there."""
        job, member, slot = self.pending
        job.wait(member, slot)
        return super().wait()


class RankWork(bindings.Work):  # type: ignore[misc]
    """A collective that a rank has issued."""

    def __init__(self, job: Job, pending: _Pending | _AnySource, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._job = job
        self._pending = pending
        self._outputs = list(outputs)

    def of(self, *outputs: Tensor) -> RankWork:
        """Return the same, with the tensors that its future is to have."""
        self._outputs = list(outputs)
        return self

    def _found(self) -> _Pending:
        pending = self._pending
        if isinstance(pending, _AnySource):
            bound = pending
            self._job.wait_elsewhere(bound.signal, lambda: bound.pending is not None, "waits for a message of any rank")
            assert bound.pending is not None
            return bound.pending
        return pending

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  (nothing here takes time)
        """Let other ranks run until it is complete."""
        self._job.wait(*self._found())
        return True

    def get_future(self) -> Any:
        """Return a future with the outputs."""
        member, slot = self._found()
        self._job.wait(member, slot, for_future=True)
        future = RankFuture()
        future.pending = self._job, member, slot
        if slot.complete:
            future.set_result(self._outputs)
        else:
            slot.futures.append(partial(future.set_result, self._outputs))
        return future

    def is_completed(self) -> bool:
        """Return whether it is complete; if not, other ranks get a turn, for a program may ask until it is."""
        complete = isinstance(self._pending, tuple) and self._pending[1].complete
        if not complete:
            self._job.ranks.sleep(0.0)
        return complete

    def is_success(self) -> bool:
        """Return whether it is complete."""
        return self.is_completed()

    def exception(self) -> None:
        """Return None: what goes wrong is raised where a rank waits."""

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def synchronize(self) -> None:
        """Let other ranks run until it is complete."""
        self.wait()

    def _source_rank(self) -> int:
        source = self._pending.source if isinstance(self._pending, _AnySource) else None
        return -1 if source is None else source

    source_rank = _source_rank


def _list(tensors: Any) -> list[Tensor]:
    """Return tensors as a flat list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in _list(each)]


def _lists(nested: Any) -> list[list[Tensor]]:
    """Return lists of tensors, where one alone may stand without its outer list."""
    return [[*nested]] if nested and isinstance(nested[0], torch.Tensor) else [[*each] for each in nested]


class RankGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A rank's process group.

    Args:
        job: the job.
        member: the rank as a member of the group.
        size: how many members there are.
        name: what torch knows the group by.
        desc: its description.
        backend: what the script has asked for.
        store: its store.
    """

    def __init__(self, job: Job, member: Member, size: int, name: str, desc: str, backend: str, store: Any) -> None:
        super().__init__(member.rank, size)
        self._job = job
        self._member = member
        self._size = size
        self._name = name
        self._desc = desc
        self._backend = backend
        self._store = store
        self._set_group_desc(desc)

    def begin(self) -> None:
        """Wait until all ranks have made it."""
        self._post("init_process_group").wait()

    # What it is.

    def rank(self) -> int:
        """Return this rank's rank in the group."""
        return self._member.rank

    def size(self) -> int:
        """Return how many members there are."""
        return self._size

    def name(self) -> str:
        """Return the backend that the script has asked for."""
        return self._backend

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Return a name of which DDP, in C++, does not think that it knows what is behind it."""
        return "aiodist"

    @property
    def group_name(self) -> str:
        """What torch knows the group by."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """Its description."""
        return self._desc

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:  # noqa: ARG002
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def get_group_store(self) -> Any:
        """Return its store."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._member.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the ledger numbers collectives."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing: what can never be complete is found without a clock."""

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Nothing: there is nothing to close."""

    abort = shutdown

    def __repr__(self) -> str:
        return f"<process group {self._name} of {self._size} ranks, checked by aiodist>"

    # Collectives.

    def _post(
        self,
        kind: str,
        compared: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        *,
        op: Any = None,
        root: int | None = None,
        **more: Any,
    ) -> RankWork:
        name = None
        if op is not None:
            name = op_name(getattr(op, "reduceOp", op))
            check_op(name)
        group = self._member.group
        asked = call(kind, compared, op=name, root=None if root is None else group.key[0][root], **more)
        contribution = Contribution(asked, inputs, outputs, -1 if root is None else root)
        slot = self._job.post(group, self._member, contribution)
        return RankWork(self._job, (self._member, slot), outputs)

    def allreduce(self, tensors: Any, opts: Any = c10d.ReduceOp.SUM, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Reduce tensors; every rank gets the results."""
        tensors = _list(tensors)
        return self._post("all_reduce", tensors, tensors, tensors, op=opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks the root's tensors."""
        tensors = _list(tensors)
        return self._post("broadcast", tensors, tensors, tensors, root=getattr(opts, "rootRank", opts))

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = c10d.ReduceOp.SUM, timeout: Any = None  # noqa: ARG002
    ) -> RankWork:  # fmt: skip
        """Reduce tensors; the root gets the results."""
        tensors = _list(tensors)
        return self._post(
            "reduce", tensors, tensors, tensors, op=getattr(opts, "reduceOp", op), root=getattr(opts, "rootRank", opts)
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks all ranks' tensors."""
        (own,), (outputs,) = _list(inputs), _lists(outputs)
        if outputs[self.rank()].shape != own.shape:
            raise ValueError(
                f"all_gather: output {self.rank()} has shape {tuple(outputs[self.rank()].shape)}, the input "
                f"{tuple(own.shape)}"
            )
        alike = all(output.shape == own.shape for output in outputs)
        return self._post("all_gather", [own] if alike else outputs, [own], outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks all ranks' lists of tensors."""
        flat = [each[index] for index in range(len(inputs)) for each in outputs]
        return self._post("all_gather", inputs, inputs, flat)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks all ranks' tensors, as one."""
        work = self._post("all_gather", [own], [own], self._cut(output))
        return work.of(output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks several tensors of all ranks, each as one."""
        flat = [part for output in outputs for part in self._cut(output)]
        return self._post("all_gather", inputs, inputs, flat).of(*outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give the root all ranks' tensors."""
        own = _list(inputs)
        return self._post("gather", own, own, _list(outputs), root=getattr(opts, "rootRank", opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give every rank one of the root's tensors."""
        own = _list(outputs)
        return self._post("scatter", own, _list(inputs), own, root=getattr(opts, "rootRank", opts))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = c10d.ReduceOp.SUM, timeout: Any = None  # noqa: ARG002
    ) -> RankWork:  # fmt: skip
        """Reduce lists of tensors; every rank gets one of the results."""
        own, (values,) = _list(outputs), _lists(inputs)
        alike = all(value.shape == own[0].shape for value in values)
        return self._post("reduce_scatter", own if alike else values, values, own, op=opts)

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any = c10d.ReduceOp.SUM) -> RankWork:
        """Reduce a tensor; every rank gets a part of the result."""
        return self._post("reduce_scatter", [output], self._cut(value), [output], op=opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = c10d.ReduceOp.SUM) -> RankWork:
        """Reduce several tensors; every rank gets a part of each result."""
        flat = [part for value in inputs for part in self._cut(value)]
        return self._post("reduce_scatter", outputs, flat, outputs, op=opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give every rank one of each rank's tensors."""
        own, values = _list(outputs), _list(inputs)
        alike = len({tuple(each.shape) for each in (*own, *values)}) == 1
        return self._post("all_to_all", values if alike else values[:1], values, own, rows=alike)

    def all_to_all_single(
        self, output: Tensor, value: Tensor, output_sizes: Any = (), input_sizes: Any = (), opts: Any = None,  # noqa: ARG002
        timeout: Any = None,  # noqa: ARG002
    ) -> RankWork:  # fmt: skip
        """Give every rank a part of each rank's tensor."""
        own = parts(output, output_sizes or (), self._size)
        values = parts(value, input_sizes or (), self._size)
        even = not (output_sizes or input_sizes)
        return self._post("all_to_all", [value], values, own, rows=even).of(output)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Wait for all ranks."""
        return self._post("barrier")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Wait for all ranks."""
        self._post("monitored_barrier").wait()

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        return parts(tensor.view(-1) if not tensor.dim() else tensor, (), self._size)

    # Messages.

    def send(self, tensors: Any, to: int, tag: int = 0) -> RankWork:
        """Send tensors to a rank."""
        return RankWork(self._job, self._job.send(self._member.group, self._member, to, tag, tensors), ())

    def recv(self, tensors: Any, source: int, tag: int = 0) -> RankWork:
        """Receive tensors from a rank."""
        pending = self._job.receive(self._member.group, self._member, source, tag, tensors)
        return RankWork(self._job, pending, tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RankWork:
        """Receive tensors from whoever sends some."""
        return RankWork(self._job, self._job.receive_any(self._member.group, self._member, tag, tensors), tensors)

    # What is not there.

    def _start_coalescing(self, device: Any = None) -> None:
        """Nothing: what is issued in between is posted one by one."""

    def _end_coalescing(self, device: Any = None) -> None:
        """Nothing."""

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise NotImplementedError("aiodist check cannot carry out ProcessGroup.split_group: make groups by new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise NotImplementedError("aiodist check cannot carry out ProcessGroup.merge_remote_group")
