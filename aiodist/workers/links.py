"""Links: connections between workers other than the first, to notice when one of them is cut.

The engine moves values between any two workers, whom the first may both reach while they do not reach each other. So
neighbours keep a connection on which each says a word now and then. The system acknowledges it, whatever the program is
at; where it does not for some seconds, the link is cut, and both tell the first worker.

Up to 33 workers each keeps one with every other; beyond, with those at distances of powers of two, over which engines'
algorithms go. A link that never came about is not watched: some machines may have nothing but the engine's own network
between them.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable, Sequence
from selectors import EVENT_READ, BaseSelector
from typing import Final

from aiodist.workers.addresses import TOKEN_BYTES, Address, first_connection, receive_exactly, ways_to
from aiodist.workers.joining import Hello
from aiodist.workers.peer import LENGTH, Peer

MOST_WITH_ALL: Final = 33
_CONNECT_SECONDS: Final = 5.0


def partners(rank: int, size: int) -> list[int]:
    """Return the workers with which a worker keeps links; it is in theirs as they are in its."""
    if rank == 0:
        return []
    if size <= MOST_WITH_ALL:
        return [other for other in range(1, size) if other != rank]
    steps = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    found = {rank ^ step for step in steps} | {(rank + step) % size for step in steps}
    found |= {(rank - step) % size for step in steps}
    return sorted(other for other in found if 0 < other < size and other != rank)


class Links:
    """This worker's links; all is called in the thread of the control plane, but what makes a link, in its own threads.

    A link may be made while the others are let go, and after that: whichever comes last closes it.

    Args:
        rank: this worker.
        hellos: what the workers have told of themselves.
        listening: this worker's socket; None where it has none.
        selector: where connections are waited for.
        made: is called with a rank and its connection, in another thread, and hands them to `add`.
        cut: is called with a rank when the link to it is cut.
    """

    def __init__(
        self,
        rank: int,
        hellos: Sequence[Hello],
        listening: socket.socket | None,
        selector: BaseSelector,
        made: Callable[[int, socket.socket], object],
        cut: Callable[[int], object],
    ) -> None:
        self._rank = rank
        self._hellos = hellos
        self._listening = listening
        self._selector = selector
        self._made = made
        self._cut = cut
        self._links: dict[int, Peer] = {}
        self._made_yet: set[socket.socket] | None = set()  # those to be added; None when all have been let go
        self._handing_over = threading.Lock()
        wanted = [other for other in partners(rank, len(hellos)) if hellos[other].address is not None]
        if listening is not None and wanted:
            listening.setblocking(False)
            selector.register(listening, EVENT_READ, self.accept)
            to_dial = [other for other in wanted if other < rank]
            threading.Thread(target=self._dial, args=(to_dial,), name="aiodist links", daemon=True).start()

    def _dial(self, ranks: Sequence[int]) -> None:
        own: Address = self._hellos[self._rank].address
        for rank in ranks:
            address: Address = self._hellos[rank].address
            same_machine = self._hellos[rank].host == self._hellos[self._rank].host
            hosts = ways_to(address, same_machine=same_machine)
            with contextlib.suppress(OSError), contextlib.ExitStack() as unless_made:
                connection = unless_made.enter_context(first_connection(hosts, address.port))
                connection.sendall(address.token + LENGTH.pack(self._rank))
                if hmac.compare_digest(receive_exactly(connection, TOKEN_BYTES), own.token):
                    unless_made.pop_all()
                    self._hand_over(rank, connection)

    def accept(self) -> None:
        """Take a link that another worker makes."""
        assert self._listening is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            threading.Thread(target=self._greet, args=(connection,), name="aiodist links", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        own: Address = self._hellos[self._rank].address
        connection.settimeout(_CONNECT_SECONDS)
        with contextlib.suppress(OSError):
            said = receive_exactly(connection, TOKEN_BYTES + LENGTH.size)
            if hmac.compare_digest(said[:TOKEN_BYTES], own.token):
                (rank,) = LENGTH.unpack(said[TOKEN_BYTES:])
                connection.sendall(self._hellos[rank].address.token)
                self._hand_over(rank, connection)
                return
        connection.close()

    def _hand_over(self, rank: int, connection: socket.socket) -> None:
        with self._handing_over:
            if self._made_yet is None:
                connection.close()
                return
            self._made_yet.add(connection)
        self._made(rank, connection)

    def add(self, rank: int, connection: socket.socket) -> None:
        """Watch a link that has been made."""
        with self._handing_over:
            assert self._made_yet is not None
            self._made_yet.remove(connection)
        link = self._links[rank] = Peer(rank, connection)
        self._selector.register(connection, EVENT_READ, lambda: self._receive(link))

    def beat(self) -> None:
        """Say a word on every link."""
        for link in list(self._links.values()):
            link.send("beat")
            try:
                link.flush()
            except OSError as error:
                self._lost(link, error)

    def _receive(self, link: Peer) -> None:
        try:
            for _ in link.messages():
                pass
        except (OSError, EOFError) as error:
            self._lost(link, error)

    def _lost(self, link: Peer, error: Exception) -> None:
        """Forget a link; one that was closed by the other end tells nothing that the first worker does not know."""
        self._drop(link)
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            self._cut(link.rank)

    def _drop(self, link: Peer) -> None:
        if self._links.pop(link.rank, None) is not None:
            self._selector.unregister(link.connection)
            link.connection.close()

    def close(self) -> None:
        """Let all links go."""
        with self._handing_over:
            made_yet, self._made_yet = self._made_yet or set(), None
        for connection in made_yet:
            connection.close()
        for link in list(self._links.values()):
            self._drop(link)
        if self._listening is not None:
            self._listening.close()
