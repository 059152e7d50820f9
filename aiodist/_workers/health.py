"""Whether a worker's process runs, as far as somebody beside it can tell: its machine, or its agent.

A silent worker may be at a long call that holds the interpreter lock, which is no fault; or it is stopped. On this
machine the system knows. On another one the agent that `aiodist run` has started beside the worker is asked. Where
neither the worker nor its agent says a word for some seconds, though its system acknowledges what it is sent, all
processes there are frozen.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from aiodist._workers.hello import Hello

SUSPICIOUS_SECONDS: Final = 1.0
FROZEN_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = 2.0
_NO_STATE: Final = "?"


class Health:
    """Finds out about silent workers.

    Args:
        hellos: what the workers have told of themselves.
        hosts: by rank, the numbers by which the machines of connected workers are reached.
        answered: is called, in a thread of its own, with a rank and the state that its agent has told; ``?`` for none.
    """

    def __init__(
        self, hellos: Sequence[Hello], hosts: Mapping[int, str], answered: Callable[[int, str], object]
    ) -> None:
        self._hellos = hellos
        self._hosts = hosts
        self._answered = answered
        self._asked: dict[int, float] = {}
        self._agent_heard: dict[int, float] = {}
        self._agent_silent: set[int] = set()

    def trouble(self, rank: int, silent: float) -> str | None:
        """Return why a worker counts as stopped that has been silent for so many seconds; None if it does not."""
        if silent < SUSPICIOUS_SECONDS:
            return None
        hello = self._hellos[rank]
        if hello.host == platform.node():
            return _STOPPED if _is_stopped(hello.pid) else None
        if hello.agent is not None:
            self._ask(rank)
            unheard = min(silent, time.monotonic() - self._agent_heard.get(rank, 0.0))
            if rank in self._agent_silent and unheard > FROZEN_SECONDS:
                return (
                    f"is stopped: neither it nor its agent has said a word for {unheard:.0f} s, though its system does"
                )
            return None
        if silent > SILENT_SECONDS:
            return f"has been silent for {silent:.0f} s, though its system answers: it is stopped"
        return None

    def told(self, rank: int, state: str) -> str | None:
        """Take what an agent has told of its worker; return why that counts as stopped, or None."""
        if state == _NO_STATE:
            self._agent_silent.add(rank)
        else:
            self._agent_silent.discard(rank)
            self._agent_heard[rank] = time.monotonic()
        return _STOPPED if state in {"T", "t"} else None

    def _ask(self, rank: int) -> None:
        now = time.monotonic()
        if rank in self._hosts and now - self._asked.get(rank, 0.0) > SUSPICIOUS_SECONDS:
            self._asked[rank] = now
            threading.Thread(target=self._ask_agent, args=(rank,), name="aiodist health", daemon=True).start()

    def _ask_agent(self, rank: int) -> None:
        state = _NO_STATE
        port, _, token = (self._hellos[rank].agent or "").partition(":")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((self._hosts[rank], int(port)), timeout=_ANSWER_SECONDS) as connection,
        ):
            connection.sendall(f"{token}?".encode())
            state = connection.recv(1).decode() or _NO_STATE
        self._answered(rank, state)


_STOPPED: Final = "is stopped: the system has halted its process"


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, as by SIGSTOP or a debugger."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in {"T", "t"}
