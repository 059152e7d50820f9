"""The stall watch: the warning about a run that makes no progress, and the proof that some replicas never will.

On an ordinary event loop nobody can know whether what a replica awaits will come. So there is a warning if for a while
no replica of a run has issued a collective, completed one or ended, and one of them waits in a collective; an error
needs a timeout of the collective. Before that, once nothing has moved for a second, the tasks are inspected: if
replicas certainly wait for each other, and nothing else can wake them, the run ends with a `DeadlockError`.

Each event loop has one timer for all its runs, which goes off about once a second; a run that begins and ends in
between costs an entry in a dict. A loop that can prove that nothing will ever run again (it has the attribute
``proves_deadlock``) has no timer, because a pending timer would count as something to come.

A warning that cannot be shown (standard error is closed, a handler raises, a filter turns warnings into errors) must
not end a correct program: there is no caller in which to raise anything.

What was rejected: a timer for each run or collective (a training loop makes thousands of runs a second); a thread that
inspects tasks (they run meanwhile); logging (without a configuration nothing would be shown, unlike a warning).
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from aiodist._arrays.environment import stall_seconds
from aiodist._core.errors import StallWarning
from aiodist._core.ledger import Slot
from aiodist._core.terms import Location
from aiodist._runtime.blocking import BlockedLoop, watch
from aiodist._runtime.loop import current_loop

PROOF_SECONDS: Final = 1.0
"""After how long without progress the tasks are inspected for replicas that wait for each other."""

_CHECKS = 4
_LONGEST_PAUSE = 0.5
_ELSEWHERE = (
    "All of this worker's replicas have arrived. Another worker's have not, or values are still being moved: "
    "timeout_seconds of CommunicationOptions ends such a wait by an error that says where replicas are"
)
After = Callable[[float, Callable[[], None]], object]
_log = logging.getLogger("aiodist")


@dataclass(slots=True)
class _Seen:
    """The progress of a run at the last check, and since when it has been that."""

    progress: tuple[int, ...] = ()
    since: float = 0.0
    warned: bool = False
    inspect_after: float = PROOF_SECONDS
    context: Context = field(default_factory=copy_context)  # the caller's: a free-threaded Python keeps filters there


class StallWatch:
    """Watches the runs of one event loop, and warns after a number of seconds without progress; never if that is 0."""

    def __init__(
        self, seconds: float, after: After, clock: Callable[[], float], blocked: BlockedLoop | None = None
    ) -> None:
        self._seconds = seconds
        self._pause = min(seconds / _CHECKS, _LONGEST_PAUSE) if seconds else _LONGEST_PAUSE
        self._after = after
        self._clock = clock
        self._runs: dict[Any, _Seen] = {}  # by `Run` of the scheduler, which is above this module
        self._ticks = False
        self._blocked = blocked

    @property
    def warns(self) -> bool:
        """Whether it warns; otherwise it only looks for deadlocks."""
        return bool(self._seconds)

    def add(self, run: Any) -> None:
        """Begin to watch a run."""
        self._runs[run] = _Seen()
        if self._blocked is not None:
            watch(self._blocked, self._runs)
        if not self._ticks:
            self._ticks = True
            self._after(self._pause, self._tick)

    def remove(self, run: Any) -> None:
        """Stop watching a run."""
        self._runs.pop(run, None)

    def _tick(self) -> None:
        self._ticks = bool(self._runs)
        for run, seen in list(self._runs.items()):
            self._check(run, seen)
        if self._ticks:
            self._after(self._pause, self._tick)

    def _check(self, run: Any, seen: _Seen) -> None:
        now, progress = self._clock(), run.ledger.progress()
        if progress != seen.progress:
            seen.progress, seen.since, seen.warned, seen.inspect_after = progress, now, False, PROOF_SECONDS
            return
        still = now - seen.since
        warns = self.warns and still >= self._seconds and not seen.warned
        inspects = still >= seen.inspect_after
        if run.threads.under_way or not (warns or inspects):
            return
        if inspects:
            seen.inspect_after = 2 * still  # less and less often
            run.look_for_deadlock()
        slot = next((slot for slot in run.ledger.open_slots() if slot.has_waiters()), None)
        if warns and slot is not None and not run.closed:
            seen.warned = True
            seen.context.run(_warn, run, slot, still)


def _warn(run: Any, slot: Slot, seconds: float) -> None:
    from aiodist._runtime.inspection import inspect_loop  # loaded only if something is wrong

    headline = (
        f"no replica has made progress for {seconds:.3g} s (AIODIST_STALL_SECONDS sets the time, 0 turns this off)"
    )
    elsewhere = [_ELSEWHERE] if slot.matched and run.span is not None else []
    _show(inspect_loop().report(headline, *elsewhere, replicas_alone=True), slot.post_of(0).location)


def _show(text: str, place: Location) -> None:
    try:
        warnings.warn_explicit(text, StallWarning, place.file, place.line)
    except Exception:  # noqa: BLE001  (see above)
        with suppress(Exception):
            _log.error(text)


# Event loops.

_watches: WeakKeyDictionary[Any, StallWatch | None] = WeakKeyDictionary()


def watch_here() -> StallWatch | None:
    """Return the stall watch of the running event loop; None if it has none."""
    loop, _ = current_loop()
    if loop not in _watches:
        _watches[loop] = _new_watch(loop)
    return _watches[loop]


def _new_watch(loop: Any) -> StallWatch | None:
    seconds = stall_seconds()
    if getattr(loop, "proves_deadlock", False):
        return None
    here: Callable[[], asyncio.AbstractEventLoop | None]
    if isinstance(loop, asyncio.AbstractEventLoop):
        here, after, clock = ref(loop), _after_on_asyncio(ref(loop)), time.monotonic
    else:
        from trio import current_time

        here, after, clock = lambda: None, _after_on_trio, current_time
    sees_blocking = seconds and hasattr(time, "pthread_getcpuclockid")
    return StallWatch(seconds, after, clock, BlockedLoop(here, _show) if sees_blocking else None)


def _after_on_asyncio(here: ref[asyncio.AbstractEventLoop]) -> After:
    def after(delay: float, fn: Callable[[], None]) -> None:
        loop = here()
        if loop is not None:
            loop.call_later(delay, fn, context=Context())

    return after


def _after_on_trio(delay: float, fn: Callable[[], None]) -> None:
    from trio import sleep
    from trio.lowlevel import spawn_system_task

    async def wait() -> None:
        await sleep(delay)
        fn()

    spawn_system_task(wait, name="aiodist stall report")
