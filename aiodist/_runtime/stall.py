"""The stall watch: the warning about a run that makes no progress, and the proof that some replicas never will.

On an ordinary event loop nobody can know whether what a replica awaits will come. So if for a while no replica of a run
has issued a collective, completed one or ended, and one of them waits in a collective, there is a warning, once for
each such pause; an error needs a timeout of the collective. Before that, once nothing has moved for a second, the tasks
are inspected: if it is certain that replicas wait for each other, and that nothing else can wake them, the run ends
with a `DeadlockError`.

Each event loop has one timer for all its runs, which goes off about once a second; a run that begins and ends in
between costs an entry in a dict. A loop that can prove that nothing will ever run again (it has the attribute
``proves_deadlock``) has no timer, because a pending timer would count as something to come.

A warning that cannot be shown (standard error is closed, a handler raises, a filter turns warnings into errors) must
not end a correct program: there is no caller in which to raise anything.

What was rejected: a timer for each run or collective (a training loop makes thousands of runs a second); a thread that
looks at tasks from outside (they run meanwhile; `blocking` has one for replicas that hold up the loop); logging (a
person who has set up none would see nothing, where a warning is shown by default, as asyncio's and trio's own are).
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from aiodist._arrays.environment import stall_seconds
from aiodist._core.errors import StallWarning
from aiodist._core.ledger import Slot
from aiodist._core.terms import Location
from aiodist._runtime.blocking import BlockedLoop, watch
from aiodist._runtime.loop import current_loop

TASK_NAME: Final = "aiodist stall report"
"""The name of its task, on trio."""

PROOF_SECONDS: Final = 1.0
"""How long nothing must have moved before it is looked for replicas that wait for each other outside of collectives."""

_LOOKS = 4
_LONGEST_PAUSE = 0.5
_ELSEWHERE = (
    "All of this worker's replicas have arrived, and another worker's have not: timeout_seconds of "
    "CommunicationOptions ends such a wait by an error that names them, and says where they are"
)
After = Callable[[float, Callable[[], None]], object]
_log = logging.getLogger("aiodist")


class _Seen:
    """The progress of a run at the last look, and since when it has been that."""

    def __init__(self) -> None:
        self.progress: tuple[int, ...] = ()
        self.since = 0.0
        self.warned = False
        self.look_after = PROOF_SECONDS
        self.context = copy_context()  # of who runs it: on a free-threaded Python, filters of warnings are kept there


class StallWatch:
    """Watches the runs of one event loop, and warns after that many seconds without progress; never if 0."""

    def __init__(
        self, seconds: float, after: After, clock: Callable[[], float], blocked: BlockedLoop | None = None
    ) -> None:
        self._seconds = seconds
        self._pause = min(seconds / _LOOKS, _LONGEST_PAUSE) if seconds else _LONGEST_PAUSE
        self._after = after
        self._clock = clock
        self._runs: dict[Any, _Seen] = {}  # by the scheduler's `Run`, which stands above this module
        self._ticks = False
        self._blocked = blocked

    @property
    def warns(self) -> bool:
        """Whether it warns; if not, it only looks for deadlocks."""
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
            self._look(run, seen)
        if self._ticks:
            self._after(self._pause, self._tick)

    def _look(self, run: Any, seen: _Seen) -> None:
        now, progress = self._clock(), run.ledger.progress()
        if progress != seen.progress:
            seen.progress, seen.since, seen.warned, seen.look_after = progress, now, False, PROOF_SECONDS
            return
        still = now - seen.since
        warns = self.warns and still >= self._seconds and not seen.warned
        looks = still >= seen.look_after
        slot = _waited_for(run) if warns or looks else None
        if slot is None:
            return
        if looks:
            seen.look_after = 2 * still  # whoever waits long is looked at ever more seldom
            run.look_for_deadlock()
        if warns and not run.closed:
            seen.warned = True
            seen.context.run(_warn, run, slot, still)


def _waited_for(run: Any) -> Slot | None:
    """Return the first collective of a run that somebody waits in; None if there is none, or a thread works on it."""
    slots = run.ledger.open_slots()
    if run.threads.under_way:
        return None
    return next((slot for slot in slots if slot.has_waiters()), None)


def _warn(run: Any, slot: Slot, seconds: float) -> None:
    from aiodist._runtime.inspection import look_at_loop  # loaded when there is something to tell

    headline = (
        f"no replica has made progress for {seconds:.3g} s (AIODIST_STALL_SECONDS sets the time, 0 turns this off)"
    )
    elsewhere = [_ELSEWHERE] if slot.matched and run.span is not None else []
    _show(look_at_loop().report(headline, *elsewhere, replicas_alone=True), slot.post_of(0).location)


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
    tells_blocking = seconds and hasattr(time, "pthread_getcpuclockid")
    if getattr(loop, "proves_deadlock", False):
        return None
    if isinstance(loop, asyncio.AbstractEventLoop):
        here = ref(loop)
        blocked = BlockedLoop(here, _show) if tells_blocking else None
        return StallWatch(seconds, lambda delay, fn: _after_on_asyncio(here(), delay, fn), time.monotonic, blocked)
    from trio import current_time

    blocked = BlockedLoop(lambda: None, _show) if tells_blocking else None
    return StallWatch(seconds, _after_on_trio, current_time, blocked)


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
