"""What engines of separate processes have in common: the first meeting blocks, and the control plane is of TCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aiodist.vocabulary.options import OrderCheck
from aiodist.workers.addresses import Address, Listening
from aiodist.workers.communicator import Request
from aiodist.workers.holdings import Holdings, PutAway
from aiodist.workers.joining import Hello
from aiodist.workers.layout import Layout
from aiodist.workers.makings import Makings
from aiodist.workers.tcp_control import TcpControl

unfinished: Final[list[object]] = []
"""What stands against an orderly end of the engine; see `TcpControl`."""


class SeparateProcess:
    """A worker that is a process of its own.

    Attributes:
        rank: its number.
        size: how many workers there are.
        makings: the strategies that all workers of the job make; None for a communicator of its own.
        holdings: what its strategy has of the engine; None for a communicator that is not ours.
        name: its own, among those.
        begun: how many operations have been begun, be it that the engine has refused one.
        done: how many of them are complete.
        moved: a digest of what those are beside records, where two that do not match could both become complete.
    """

    makings: Makings | None = None
    holdings: Holdings | None = None
    name = ""

    rank: int
    size: int
    _listening: Listening | None = None
    _handle: Any  # the engine's own
    _kept: Any = None  # the same, when it is put away

    def __init__(self) -> None:
        self.begun = self.done = self.moved = 0

    def _belong_to(self, holdings: Holdings | None, name: str) -> None:
        """Belong to a strategy; None: a new one."""
        self.holdings, self.name = holdings or Holdings(), name
        self.holdings.add(self)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is in the air that this worker has begun."""
        return self.begun == self.done

    def put_away(self) -> bool:
        """Let nothing be begun any more, where nothing is in the air; return whether that is so."""
        if self._kept is None and self.is_at_rest:
            self._kept, self._handle = self._handle, PutAway()
        return self._kept is not None and self.is_at_rest  # another thread may have begun something meanwhile

    def give_back(self) -> None:
        """Give what was put away back to the engine, as all its workers do."""
        raise NotImplementedError

    def wait(self, request: Request) -> None:
        """Block until a request is complete.

        Raises:
            TimeoutError: another worker has not begun it for five minutes.
        """
        Makings().wait(request, self.rank, self.size)

    def listening(self) -> Address | None:
        """Return where this worker's control plane listens."""
        if self.size > 1:
            self._listening = Listening(first=self.rank == 0)
            return self._listening.address
        return None

    def control(self, layout: Layout, order_check: OrderCheck, hellos: Sequence[Hello]) -> TcpControl:
        """Return this worker's control plane."""
        control = TcpControl(layout, order_check, hellos, self._listening, unfinished, self.makings)
        control.holdings = self.holdings
        return control
