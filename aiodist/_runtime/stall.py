"""The stall report: a warning when the replicas of a run stand still, saying who waits for what.

On an ordinary event loop nobody can know whether what a replica awaits will come. So when none of a run's replicas has
issued a collective, completed one or ended for a while, and one of them waits in a collective, that is told as a
warning, once for each time they stand still, and nothing else is done; an error is what a collective's own timeout is
for. Values on their way between workers get on as long as operations of theirs are completed.

One timer an event loop looks after all runs in it, a few times in the time allowed; a run that begins and ends between
two looks costs the entry in a dict. On a loop that can prove that nothing will ever run again (it says so by an
attribute ``proves_standstill``) there is no timer, for a pending timer would count as something to come.

What was rejected: a timer for each run or meeting (a training loop makes thousands of runs a second); a thread that
looks from outside (it cannot look at tasks while they run); logging (a person who has set up none would see nothing,
where a warning is shown by default, as asyncio's and trio's own are).
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from aiodist._arrays.environment import stall_seconds
from aiodist._core.errors import StallWarning
from aiodist.collective.callsite import location
from aiodist.replica.engine import running_on_trio

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.rendezvous import Rendezvous

TASK_NAME: Final = "aiodist stall report"
"""The name of its task, on trio."""

_LOOKS = 4
_MOST_LINES = 20
_ELSEWHERE = (
    "all of this worker's replicas have arrived, and another worker's have not: timeout_seconds of "
    "CommunicationOptions ends such a wait by an error that names them, and says where they are"
)
_ON_THEIR_WAY = (
    "all replicas have arrived, and values that they have brought do not come: timeout_seconds of CommunicationOptions "
    "ends such a wait by an error"
)
After = Callable[[float, Callable[[], None]], object]
_log = logging.getLogger("aiodist")


class _Seen:
    """How far a run had come when it was looked at last, and since when."""

    def __init__(self) -> None:
        self.progress: tuple[int, ...] = ()
        self.since = 0.0
        self.told = False


class StallWatch:
    """Looks after the runs of one event loop.

    Args:
        seconds: how long they may stand still.
        after: calls a function in the event loop, after that many seconds.
        clock: tells the time, in seconds.
    """

    def __init__(self, seconds: float, after: After, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._after = after
        self._clock = clock
        self._runs: dict[SyncGroup, _Seen] = {}
        self._ticks = False

    def add(self, group: SyncGroup) -> None:
        """Look after a run from now on."""
        self._runs[group] = _Seen()
        if not self._ticks:
            self._ticks = True
            self._after(self._seconds / _LOOKS, self._tick)

    def remove(self, group: SyncGroup) -> None:
        """Look after a run no more."""
        self._runs.pop(group, None)

    def _tick(self) -> None:
        self._ticks = bool(self._runs)
        for group, seen in self._runs.items():
            self._look(group, seen)
        if self._ticks:
            self._after(self._seconds / _LOOKS, self._tick)

    def _look(self, group: SyncGroup, seen: _Seen) -> None:
        now, progress = self._clock(), _progress(group)
        if progress != seen.progress:
            seen.progress, seen.since, seen.told = progress, now, False
        elif now - seen.since >= self._seconds and not seen.told:
            meeting = _waited_for(group)
            if meeting is not None:
                seen.told = True
                _warn(group, meeting, now - seen.since)


def _progress(group: SyncGroup) -> tuple[int, ...]:
    """Return numbers of which one grows whenever a replica of a run gets on."""
    groups = group.groups()
    return (
        sum(member.sequence for one in groups for member in one.members),
        sum(len(one.open) for one in groups),
        sum(member.end is not None for member in group.members),
        len(groups),
        sum(come_to for _, come_to in _on_their_way(group)),
    )


def _on_their_way(group: SyncGroup) -> list[tuple[Rendezvous | None, int]]:
    """Return the collectives of a run whose values move between workers, with how far each has come."""
    bridges = [one.bridge for one in group.groups() if one.bridge is not None]
    return [found for bridge in bridges if (found := bridge.on_its_way) is not None]


def _waited_for(group: SyncGroup) -> Rendezvous | None:
    """Return the first collective of a run that somebody waits in; None for none, or when threads carry one out."""
    meetings = [one.open[number] for one in group.groups() for number in sorted(one.open)]
    if any(meeting.under_way for meeting in meetings):
        return None
    return next((meeting for meeting in meetings if meeting.has_waiters()), None)


def _warn(group: SyncGroup, meeting: Rendezvous, seconds: float) -> None:
    from aiodist.replica.waits import look_at_loop  # loaded when there is something to tell

    place = location(meeting.code, meeting.offset)
    graph = look_at_loop()
    lines = graph.lines(replicas_alone=True)
    more = [f"… and {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
    cycle = graph.cycle_text()
    text = "\n  ".join(
        [
            f"no replica has got on for {seconds:.3g} s (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
            *lines[:_MOST_LINES],
            *more,
            *([f"in a circle: {cycle}"] if cycle else []),
            *([_where_it_is(group, meeting)] if meeting.agreed and not meeting.complete else []),
        ]
    )
    text += _made_differently(group)
    try:
        warnings.warn_explicit(text, StallWarning, place.file, place.line)
    except StallWarning:  # a filter makes errors of warnings, and there is no caller to raise one in
        _log.error(text)


def _where_it_is(group: SyncGroup, meeting: Rendezvous) -> str:
    return _ON_THEIR_WAY if any(meeting is moving for moving, _ in _on_their_way(group)) else _ELSEWHERE


def _made_differently(group: SyncGroup) -> str:
    """Say so where the workers of a run have made its strategy at different places."""
    standing = getattr(getattr(group.bridge, "team", None), "standing", None)
    return "" if standing is None else str(standing.made_differently)


# Event loops.

_watches: WeakKeyDictionary[Any, StallWatch | None] = WeakKeyDictionary()


def watch_here() -> StallWatch | None:
    """Return what looks after runs in the event loop that runs here; None where nothing is to.

    Raises:
        ValueError: ``AIODIST_STALL_SECONDS`` is no number of seconds.
    """
    loop = _loop_here()
    if loop is None:
        return None
    if loop not in _watches:
        _watches[loop] = _new_watch(loop)
    return _watches[loop]


def _loop_here() -> Any:
    if running_on_trio():
        from trio.lowlevel import current_trio_token

        return current_trio_token()
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # a loop that aiodist does not know, which is told where replicas are to start
        return None


def _new_watch(loop: Any) -> StallWatch | None:
    seconds = stall_seconds()
    if not seconds or getattr(loop, "proves_standstill", False):
        return None
    if isinstance(loop, asyncio.AbstractEventLoop):
        here = ref(loop)
        return StallWatch(seconds, lambda delay, fn: _after_on_asyncio(here(), delay, fn), time.monotonic)
    from trio import current_time

    return StallWatch(seconds, _after_on_trio, current_time)


def _after_on_asyncio(loop: asyncio.AbstractEventLoop | None, delay: float, fn: Callable[[], None]) -> None:
    if loop is not None:
        loop.call_later(delay, fn, context=Context())


def _after_on_trio(delay: float, fn: Callable[[], None]) -> None:
    from trio import sleep
    from trio.lowlevel import spawn_system_task

    async def wait() -> None:
        await sleep(delay)
        fn()

    spawn_system_task(wait, name=TASK_NAME)
