"""Turns: callers of one lane use it one after the other, in the order of their calls; some leave before their turn.

Other workers wait for the call of one that has left, all the same, behind those before it. So it keeps its place, and
the others are told when that is reached, whether or not anything else is called here. A call that was refused for its
arguments has left, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

import anyio

from aiodist.replica.lasting_event import LastingEvent

_MOST_CHARACTERS: Final = 300


def refusal_text(error: BaseException) -> str:
    """Return what other workers read of an error in the arguments of a call."""
    told = f"{type(error).__name__}: {error}".partition("\n")[0]
    return told if len(told) <= _MOST_CHARACTERS else f"{told[: _MOST_CHARACTERS - 2]} …"


class Turns:
    """The callers of a lane.

    Args:
        prepare: waits until the lane may be used by the one whose turn it is.
        abandon: tells the others of a call that its caller has left.
    """

    def __init__(self, prepare: Callable[[], Awaitable[None]], abandon: Callable[..., object]) -> None:
        self._prepare = prepare
        self._abandon = abandon
        self._waiting: deque[Turn] = deque()

    @property
    def in_use(self) -> bool:
        """Whether somebody has a turn, or waits for one."""
        return bool(self._waiting)

    def turn(self, *call: Any) -> Turn:
        """Return a turn for a call, which is had inside of ``async with``."""
        return Turn(self, call)

    def refuse(self, error: Exception, *call: Any) -> None:
        """Note, in any thread, a call that was refused for its arguments; `go_on` tells the others, or the next one."""
        turn = Turn(self, (*call, refusal_text(error)))
        turn.left = True
        self._waiting.append(turn)

    def pass_on(self, turn: Turn) -> None:
        """Take a turn whose caller has left already."""
        turn.left = True
        self._waiting.append(turn)
        self.go_on()

    async def begin(self, turn: Turn) -> None:
        """Wait for a turn."""
        self._waiting.append(turn)
        try:
            if self._waiting[0] is not turn:
                turn.ready = LastingEvent()
                self.go_on()
                await turn.ready.wait()
            await self._prepare()
        except BaseException:
            turn.left = True
            self.go_on()
            raise

    def end(self) -> None:
        """Let the next one have its turn."""
        self._waiting.popleft()
        self.go_on()

    def go_on(self) -> None:
        """Tell the others of those calls that have been left, up to the next one whose caller is there."""
        while self._waiting and self._waiting[0].left:
            self._abandon(*self._waiting.popleft().call)
        if self._waiting and self._waiting[0].ready is not None:
            self._waiting[0].ready.set()


class Turn:
    """One turn.

    Args:
        turns: all of them.
        call: what is called, as ``abandon`` takes it.

    Attributes:
        left: its caller has left before it came.
        ready: is set when it comes, where somebody waits for that.
    """

    def __init__(self, turns: Turns, call: tuple[Any, ...]) -> None:
        self._turns = turns
        self.call = call
        self.left = False
        self.ready: LastingEvent | None = None

    def leave(self) -> None:
        """Give it up before anybody waits for it."""
        self._turns.pass_on(self)

    async def __aenter__(self) -> Self:
        await self._turns.begin(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.left:
            self._turns.go_on()
        else:
            self._turns.end()

    async def wait_for(self, ready: Callable[[], Awaitable[object]] | None) -> None:
        """Wait for what the call brings, where that is to be waited for; who is cancelled, is behind it.

        Raises:
            Exception: what goes wrong with it; the others hear of that.
        """
        if ready is None:
            return
        try:
            with anyio.CancelScope(shield=True):
                await ready()
        except BaseException as error:
            self.left, self.call = True, (*self.call, refusal_text(error))
            raise
