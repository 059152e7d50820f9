"""A run's span: takes its collectives to the other workers, and returns results or the report.

`RunSpan` is what a `_runtime` run has of other workers: the run tells it what all local replicas have posted, and that
a group is in trouble; it completes slots and fails the run. The run's own group has the channel that was chosen at the
run's opening. A group whose members live on several workers is given a channel at its first collective: the
coordinator says when all its workers have come to that.

**Trouble.** Whatever is wrong, here or elsewhere, ends in one message to the coordinator (`tell`), once local replicas
have settled. A record that differs, a replica's own exception and a collective whose time is up are found here; of the
rest the coordinator tells. From the number on that is in trouble, no record is contributed any more. What
lies before it is carried out as ever, so that every worker's replicas get as far as they would on one machine.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiodist._collectives import kinds
from aiodist._core.call import Call, OrderCheck, Post, path_of
from aiodist._core.errors import CollectiveError
from aiodist._core.ledger import Group
from aiodist._core.snapshot import GroupKey, Overdue
from aiodist._core.text import brief
from aiodist._workers.exchange import contributed
from aiodist._workers.messages import Ask, GroupTag, OpenGroup, Query, Trouble, Waiting
from aiodist._workers.record import FLOAT64, NO_FLAGS, Agreement, Found, callers_of, digest_of
from aiodist._workers.session import Carrier, Route, Session, Step
from aiodist._workers.team import Team
from aiodist._workers.transport import OF_VALUES, Communicator, Steps, as_bytes

if TYPE_CHECKING:
    from aiodist._runtime.rendezvous import Rendezvous
    from aiodist._runtime.scheduler import Run

_MOST_KEPT: Final = 1024


class RunSpan(Carrier):
    """What one run has to do with the other workers.

    Attributes:
        is_over: all replicas of all workers have ended.
        error: what has ended the run; None while all is well.
    """

    def __init__(self, team: Team, number: int, channel: int, communicator: Communicator, run: Run) -> None:
        self.number = number
        self.is_over = self._finishing = self._left = False
        self.error: CollectiveError | None = None
        self._team = team
        self._run = run
        self._channel = channel
        self._root = Session(f"run {number}", communicator, self)
        self._groups: dict[GroupKey, _SpannedGroup] = {}
        self._tagged: Counter[tuple[int, ...]] = Counter()  # by workers, how many of their groups have been given tags
        self._doomed: dict[GroupKey, int] = {}
        self._routes: dict[Any, Route] = {}
        self._blocked: tuple[int, ...] = ()
        self._seen: Any = None
        team.enter(number, self)

    # What the run tells.

    def matched(self, slot: Rendezvous) -> None:
        """Agree with the other workers on what all local members have posted, move its values, and complete it."""
        group = slot.group
        if group.is_root:
            self._post(self._root, slot)
            return
        spanned = self._groups.get(group.key) or self._open_group(group)
        if spanned.session is None:
            spanned.waiting.append(slot)
        else:
            self._post(spanned.session, slot)

    def _post(self, session: Session, slot: Rendezvous) -> None:
        if slot is slot.group.joining:
            session.join()
        else:
            values = None if slot.absent else contributed(slot)  # now: a run that fails forgets what its slots hold
            flags = FLOAT64 if slot.options.accumulate == "float64" else NO_FLAGS
            session.post(Step(self._route(session, slot), slot, flags, values))
        self._team.start(session)

    def _route(self, session: Session, slot: Rendezvous) -> Route:
        key = session, id(slot.call), id(slot.code), slot.offset, slot.path
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= _MOST_KEPT:
                self._routes.clear()
            order_check = self._team.order_check
            post = slot.post_of(0)
            counts = order_check is OrderCheck.CALL_SITE and post.call.name is None
            route = self._routes[key] = Route(
                digest_of(order_check, post),
                session.site((slot.code, slot.offset)),
                callers_of(post) if counts else None,
                *self._team.moving.ways(session, slot),
                (slot.call, slot.code),
            )
        return route

    def made(self, group: Group) -> None:
        """Hear of a group with members on other workers, from the first local member that makes it."""
        if group.key in self._doomed:
            self._run.doom(group, self._doomed.pop(group.key))

    def troubled(self, group: Group, overdue: Overdue | None) -> None:
        """Have all workers' snapshots analysed: every local member of a doomed group has settled."""
        self.tell(group=group, overdue=overdue)

    def stuck(self, replica_ids: Collection[int]) -> None:
        """Hear which local replicas only wait, again and again; report what is the same the second time."""
        seen = tuple(sorted(replica_ids)), self._run.ledger.progress()
        if seen == self._seen:
            self._blocked = seen[0]
            self._tell_waiting()
        self._seen = seen

    async def finish(self, failures: Mapping[int, BaseException]) -> None:
        """Meet the other workers at the end of the run; where they have not come to it, the run has failed then."""
        self.end(failures)
        await self._team.driver.until(lambda: self.is_settled)

    def end(self, failures: Mapping[int, BaseException]) -> None:
        """Tell the other workers that all local replicas have ended."""
        self._finishing = True
        ledger = self._run.ledger
        if failures or ledger.troubled or any(replica.end != "exited" for replica in ledger.replicas):
            self.tell(failures=failures)
        else:
            self._root.end()
            self._team.start(self._root)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing more to hear of the run from other workers."""
        failed = any(replica.end == "failed" for replica in self._run.ledger.replicas)
        return self.is_over or self.error is not None or (self.told and self._finishing and failed)

    def abandon(self) -> None:
        """Tell the other workers that this one's caller was cancelled: its replicas have ended."""
        self._finishing = True
        if not self.is_over:
            self.tell()

    def leave(self) -> None:
        """Give back what the run has had of the strategy; nobody waits in it any more, and its loop may be gone."""
        self._left = True
        sessions = [spanned.session for spanned in self._groups.values()]
        if self.is_over and not self.told and all(session is not None and session.is_idle for session in sessions):
            self._team.free_channel(self._channel)

    # Groups.

    def _open_group(self, group: Group) -> _SpannedGroup:
        found = self._groups[group.key] = _SpannedGroup(self._team, group)
        self._team.control.send(OpenGroup(self.number, group.key, found.workers))
        return found

    def _make_session(self, spanned: _SpannedGroup, tag: GroupTag) -> Steps[None]:
        """Make the communicator of a group, as all its workers do now."""
        key = self._channel, spanned.workers, self._tagged[spanned.workers]
        self._tagged[spanned.workers] += 1
        communicator = yield from self._team.communicator_of_group(key, tag.tag)
        session = Session(f"run {self.number} group {tag.group} {spanned.creation.hex()}", communicator, self)
        if self.told:
            session.freeze()
        spanned.session = session
        waiting, spanned.waiting = spanned.waiting, []
        for slot in waiting:
            self._post(session, slot)

    def _group_of(self, session: Session) -> Group:
        if session is self._root:
            return self._run.ledger.root
        spanned = next(each for each in self._groups.values() if each.session is session)
        group = spanned.group()
        assert group is not None
        return group

    # Steps.

    def move(self, session: Session, step: Step | None, found: Found, prepared: Any) -> Steps[None] | None:
        """Return what moves the values of a step that all workers have agreed on, and makes its result."""
        if step is None:
            return self._team.outcome(self._team.moving.gather(session, None), lambda *_: None)
        slot: Rendezvous = step.what
        if step.route.small is not None and found.agreement is Agreement.ALIKE:
            try:
                self._run.complete(slot, step.route.small.take(slot, found), None)
            except OF_VALUES as error:
                self._run.complete(slot, None, error)
            return None
        if found.agreement is Agreement.WITHOUT_SOME:
            steps = self._team.moving.gather(session, slot)
        elif slot.request.kind is kinds.MERGE_CALL:
            self._run.start_merge(slot)
            return None
        else:
            steps = self._team.moving.move(session, slot, found, prepared)
        return self._team.outcome(steps, partial(self._run.complete, slot))

    def finish_join(self, session: Session) -> Steps[None]:
        """Find out which replica was the last to join, and let all go on."""
        group = self._group_of(session)
        slot: Any = group.joining
        last = slot.values[0] if slot.values else group.members[-1].rank
        own = np.array([group.number_of_join(), last], np.int64)
        everyone = np.empty((session.communicator.size, 2), np.int64)
        yield session.communicator.iallgather(as_bytes(own), as_bytes(everyone))
        number, last = max(everyone.tolist())
        self._run.finish_join(slot, number, last)

    # Trouble.

    def diverged(self, session: Session) -> None:
        """Hear that the workers are at different calls: local replicas settle, and then this worker tells."""
        self._doom(self._group_of(session), session.number)

    def over(self) -> None:
        """Hear that all replicas of all workers have ended."""
        self.is_over = True

    def receive(self, message: Ask | Query | GroupTag) -> None:
        """Take what the coordinator asks or tells."""
        match message:
            case Ask():
                self._asked(message)
            case Query() if self._is_well:  # else its event loop may be gone
                self._blocked = tuple(sorted(self._run.waiting_for_good()))
                self._tell_waiting(is_answer=True)
            case GroupTag():
                spanned = self._groups.get(message.group)
                if spanned is not None:
                    self._team.driver.start(self._make_session(spanned, message))

    def _asked(self, ask: Ask) -> None:
        """Tell what there is to tell, once the local replicas have settled, as others are in trouble."""
        groups = {group.key: group for group in self._run.ledger.groups()}
        if ask.group is None or ask.number is None or self._finishing:
            self.tell()
        elif ask.group in groups:
            self._doom(groups[ask.group], ask.number)
        elif self._run.ledger.replicas and set(self._team.layout.own).isdisjoint(ask.group[0]):
            self.tell()
        else:  # a group that is not made here yet; where it never is, somebody answers in the run's place
            self._doomed[ask.group] = ask.number

    def _doom(self, group: Group, number: int) -> None:
        spanned = self._groups.get(group.key)
        session = self._root if group.is_root else spanned and spanned.session
        if session:
            session.freeze(number)
        if self._finishing:
            self.tell(group=group)
        elif not self.told:
            self._run.doom(group, number)

    def tell(
        self,
        *,
        group: Group | None = None,
        overdue: Overdue | None = None,
        failures: Mapping[int, BaseException] | None = None,
        note: str = "",
    ) -> None:
        """Tell the coordinator this worker's part, once; from any thread."""
        if self.told or self.error is not None:
            return
        self.told = True
        key, number = (None, None) if group is None else (group.key, group.doomed)
        if overdue is not None:
            number = overdue.number
        found = tuple(f"Replica {i} raised {brief(error)}" for i, error in (failures or {}).items())
        snapshot = self._run.snapshot(blocked=self._blocked)
        self._team.control.send(Trouble(self.number, snapshot, key, number, overdue, found, note))

    @property
    def _is_well(self) -> bool:
        """Whether the run goes on, and nothing is wrong here."""
        return not self.told and not self.is_over and self.error is None

    def _tell_waiting(self, *, is_answer: bool = False) -> None:
        """Tell the coordinator what local replicas wait in, while nothing is wrong here."""
        if self._is_well:
            self._team.control.send(Waiting(self.number, self._run.snapshot(blocked=self._blocked), is_answer))

    def fail(self, error: CollectiveError) -> None:
        """End the run: the strategy has ended."""
        if self.is_over or self.error is not None:
            return
        self.error = error
        for session in (self._root, *(spanned.session for spanned in self._groups.values())):
            if session is not None:
                session.freeze()
        if not self._left:
            self._run.fail(error)


class _SpannedGroup:
    """A group with members on several workers, and its session, once there is one; until then, its slots wait."""

    def __init__(self, team: Team, group: Group) -> None:
        self.workers = team.layout.workers_of(group.key[0])
        self.group = weakref.ref(group)
        self.session: Session | None = None
        self.waiting: list[Rendezvous] = []
        call = Call("new_group", members=group.key[0], name=group.key[1])
        post = Post(call, path_of([group.made_at or (None, 0)]))
        self.creation = digest_of(team.order_check, post)  # all have made it at one place
