"""What engines of separate processes have in common: the first meeting blocks, and the control plane is of TCP."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from aiodist._core.call import OrderCheck
from aiodist.workers import joining
from aiodist.workers.addresses import Address, Listening
from aiodist.workers.communicator import Request
from aiodist.workers.joining import Hello
from aiodist.workers.layout import Layout
from aiodist.workers.tcp_control import TcpControl

unfinished: Final[list[object]] = []
"""What stands against an orderly end of the engine; see `TcpControl`."""

in_the_air: Final[deque[Request]] = deque()
"""Requests that nobody waits for any more; they keep the buffers that the engine may still read and write."""


class SeparateProcess:
    """A worker that is a process of its own.

    Attributes:
        rank: its number.
        size: how many workers there are.
    """

    rank: int
    size: int
    _listening: Listening | None = None

    def wait(self, request: Request) -> None:
        """Block until a request is complete.

        Raises:
            TimeoutError: another worker has not begun it for five minutes.
        """
        joining.wait(request, self.rank, self.size)

    def listening(self) -> Address | None:
        """Return where this worker's control plane listens."""
        if self.size > 1:
            self._listening = Listening(first=self.rank == 0)
            return self._listening.address
        return None

    def control(self, layout: Layout, order_check: OrderCheck, hellos: Sequence[Hello]) -> TcpControl:
        """Return this worker's control plane."""
        return TcpControl(layout, order_check, hellos, self._listening, unfinished)
