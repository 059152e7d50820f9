"""The launcher's end of connections to the agents on other machines, who have no folder of notes in common with it.

An agent connects, says the token, then that its worker waits to meet the others or has met them, and how it has ended;
the launcher notes that down as workers and agents do on its own machine.
In the other direction go the numbers of signals. When the launcher ends, or is cut off, the agents notice by the end of
the connection, and end their workers.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

from aiodist._tools.launch.worker_agent import keep_alive, listen
from aiodist.workers.addresses import own_numbers


@dataclass(slots=True)
class _Line:
    """A connection from what says that it is an agent."""

    received: bytes = b""
    known: bool = False
    told: bool = False


class Switchboard:
    """Connections to agents; nothing here blocks.

    Args:
        notes: the folder of notes.
    """

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        self._socket = listen()
        self._socket.setblocking(False)
        self._token = secrets.token_hex(16)
        self._lines: dict[socket.socket, _Line] = {}

    @property
    def address(self) -> str:
        """Where agents connect: "host,host:port:token"."""
        hosts = ",".join([*own_numbers(), socket.gethostname()])
        return f"{hosts}:{self._socket.getsockname()[1]}:{self._token}"

    def serve(self) -> None:
        """Take what agents have to say."""
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                keep_alive(connection)
                self._lines[connection] = _Line()
        for connection, line in list(self._lines.items()):
            self._hear(connection, line)

    def _hear(self, connection: socket.socket, line: _Line) -> None:
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *said, line.received = (line.received + data).split(b"\n")
        if not data or not all(self._take(line, words) for words in said):
            self._note_loss(line)
            del self._lines[connection]
            connection.close()

    def _take(self, line: _Line, words: bytes) -> bool:
        """Take what an agent says, the token first; return whether it is one."""
        if not line.known:
            line.known = compare_digest(words, self._token.encode())
            return line.known
        what, worker, code = words.decode().split()
        line.told = line.told or what == "ended"
        note = self._notes / f"{what}.{worker}"
        if what in {"apart", "met"}:
            note.with_name(f"meeting.{worker}").unlink(missing_ok=True)
        if what == "met":
            code = str(int(note.read_text()) + 1 if note.exists() else 1)
        note.write_text(code)
        return True

    def _note_loss(self, line: _Line) -> None:
        """Count a worker as failed whose agent was killed, or is cut off."""
        if line.known and not line.told:
            (self._notes / f"ended.lost-{id(line)}").write_text("1")

    def send(self, number: int) -> None:
        """Let all agents have a signal."""
        for connection, line in self._lines.items():
            with suppress(OSError):
                if line.known:
                    connection.sendall(bytes([number]))

    def close(self) -> None:
        """Let the agents go, who then end their workers."""
        for connection in [*self._lines, self._socket]:
            connection.close()
