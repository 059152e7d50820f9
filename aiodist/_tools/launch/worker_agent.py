"""The agent of one worker under `aiodist run`: starts it, notes how it ended, and lets the others end, too.

    python worker_agent.py NOTES WORKERS WHERE COMMAND...

It is a script, and starts without the package: nothing here imports anything but the standard library.

The worker has a session of its own, so that it can be killed with everything that it has started, and where the system
can do that (Linux) it dies with its agent. A failed worker's agent stays for some seconds: a launcher ends the whole
job when the first of its processes fails, and the other workers have a report to print; or, after Ctrl-C, what to save.

WHERE is ``here``; or where the launcher of a job that spans machines answers. Such an agent tells it how its worker has
ended, and gets the signals from it; and it answers workers on other machines, who cannot see whether this one's is
stopped or only busy: a connection that says the right token and ``?`` gets the worker's state in one letter. Its own
worker tells it by a letter that it waits to meet the others, and that they have met.

SIGINT and SIGTERM are passed on, and the worker is killed where it has not ended some seconds later. SIGHUP, and the
end of the agent's parent, kill it at once.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Final

OTHERS_SECONDS: Final = 3.0
ENDING_SECONDS: Final = 3.0
_TURN_SECONDS: Final = 0.05
_KILL_SECONDS: Final = 2.0
_LINUX: Final = sys.platform == "linux"
_STAGES: Final = {b"e": "meeting", b"t": "met", b"a": "apart", b"l": "leaving", b"o": "echo"}  # as a worker names them
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def main(notes: Path, workers: int, where: str, command: list[str]) -> int:
    """Run a worker; return its exit code, as shells have it."""
    parent = os.getppid()
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    die_with_parent(signal.SIGHUP)
    adopt_orphans()
    lines = None if where == "here" else _Lines(where, asked)
    os.putenv("AIODIST_AGENT", lines.address if lines else "")
    worker = subprocess.Popen(  # noqa: S603  (the command that the user gave)
        command,
        start_new_session=True,
        stdin=None if _is_first() else subprocess.DEVNULL,  # MPICH's others would wait for what never comes
        close_fds=False,  # a launcher may speak to it through descriptors that it has inherited
        preexec_fn=die_with_parent,  # noqa: PLW1509  (this process has no threads)
    )
    here = _note(notes, f"started.{worker.pid}", f"{os.getpid()} {worker.pid}")
    if lines is not None:
        lines.name = f"{worker.pid}" if here else f"{lines.name}-{worker.pid}"
    code = _follow(worker, parent, asked, lines)
    if lines is None:
        if asked:  # it has not failed by itself
            _note(notes, f"echo.{worker.pid}", "")
        _note(notes, f"ended.{worker.pid}", str(code))
    else:
        lines.serve(worker.pid)  # what it has said last
        if asked:
            lines.tell("echo")
        lines.tell("ended", code)
    kill_descendants()
    if code:
        _wait_for_others(worker.pid, notes, workers, asked, lines)
    return code


def _note(notes: Path, name: str, text: str) -> bool:
    """Leave a note in one piece; return whether there is a folder for it, as there is on the launcher's machine."""
    try:
        draft = notes / f"draft.{name}"
        draft.write_text(text)
        draft.rename(notes / name)
    except OSError:
        return False
    return True


def _is_first() -> bool:
    """Return whether this is the first worker, by the variables of whatever has started it."""
    found = spec_from_file_location("environment", Path(__file__).parents[2] / "_arrays" / "environment.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return bool(module.is_first_of_job())


def _follow(worker: subprocess.Popen[bytes], parent: int, asked: list[int], lines: _Lines | None) -> int:
    """Wait for a worker's end, or bring it about when that is asked for; return its exit code."""
    passed_on, kill_at = 0, float("inf")
    while worker.poll() is None:
        if os.getppid() != parent or signal.SIGHUP in asked or time.monotonic() > kill_at:
            _signal_group(worker, signal.SIGKILL)
        for number in asked[passed_on:]:
            passed_on += 1
            kill_at = min(kill_at, time.monotonic() + ENDING_SECONDS)
            _pass_on(worker, number)
        if lines is not None:
            lines.serve(worker.pid)
        with suppress(subprocess.TimeoutExpired):
            worker.wait(_TURN_SECONDS)
    return worker.returncode if worker.returncode >= 0 else 128 - worker.returncode


class _Lines:
    """Connections of an agent to other machines: to the launcher, and from who asks for the worker's state.

    Args:
        where: the launcher's address, "host,host:port:token".
        asked: gets the signals that the launcher passes on; SIGHUP where it is gone.

    Attributes:
        name: tells its worker from those of other machines.
        address: where this agent answers, and to which token: "port:token".
    """

    def __init__(self, where: str, asked: list[int]) -> None:
        self._asked = asked
        self._socket = listen()
        self._socket.setblocking(False)
        self._token = secrets.token_hex(16)
        self.address = f"{self._socket.getsockname()[1]}:{self._token}"
        self.name = secrets.token_hex(4)
        hosts, port, token = where.rsplit(":", 2)  # a host may be a number of IPv6
        self._launcher = _connection(hosts.split(","), int(port))
        if self._launcher is not None:
            self._launcher.sendall(f"{token}\n".encode())
            self._launcher.setblocking(False)

    def serve(self, worker: int) -> None:
        """Hear the launcher, and answer all who have asked; nobody is waited for for long."""
        if self._launcher is not None:
            with suppress(BlockingIOError):
                self._hear(self._launcher)
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    connection.settimeout(_TURN_SECONDS)
                    said = connection.recv(len(self._token) + 1, socket.MSG_WAITALL)
                    if not secrets.compare_digest(said[:-1], self._token.encode()):
                        continue
                    if stage := _STAGES.get(said[-1:]):
                        self.tell(stage)
                    else:
                        connection.sendall(state_of(worker).encode() or b"Z")

    def _hear(self, launcher: socket.socket) -> None:
        try:
            numbers = launcher.recv(64)
        except BlockingIOError:
            raise
        except OSError:
            numbers = b""
        self._asked += numbers or [signal.SIGHUP]

    def tell(self, what: str, code: int = 0) -> None:
        """Tell the launcher what the worker has done, and how it has ended."""
        if self._launcher is not None:
            with suppress(OSError):
                self._launcher.sendall(f"{what} {self.name} {code}\n".encode())


def listen() -> socket.socket:
    """Return a socket that listens to IPv6 and IPv4, where the system has both."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # it is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _connection(hosts: list[str], port: int) -> socket.socket | None:
    """Return a connection to the first host that answers, which ends some seconds after the other end is cut off."""
    for host in hosts:
        with suppress(OSError):
            found = socket.create_connection((host, port), timeout=2.0)
            keep_alive(found)
            return found
    return None


def keep_alive(connection: socket.socket) -> None:
    """Let a connection end some seconds after the other end is cut off, also where nothing is said on it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _pass_on(worker: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal as a terminal and as `kill` do: Ctrl-C is for all of a session, SIGTERM for a process."""
    if number == signal.SIGINT:
        _signal_group(worker, number)
    else:
        worker.send_signal(number)


def _signal_group(worker: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, number)


def _wait_for_others(worker: int, notes: Path, workers: int, asked: list[int], lines: _Lines | None) -> None:
    """Wait until all workers of this machine have ended, if they are all of the job, or for some seconds.

    The end of the launcher, and a second request to end, end that at once.
    """
    until = time.monotonic() + OTHERS_SECONDS
    while time.monotonic() < until and len(list(notes.glob("ended.*"))) < workers:
        if lines is not None:
            lines.serve(worker)
        if signal.SIGHUP in asked or len(asked) > 1:
            return
        time.sleep(_TURN_SECONDS)


# Processes, as Linux shows them.


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let this process get a signal when the one that has started it ends; on Linux."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


_older: set[int] = set()


def adopt_orphans() -> None:
    """Let what this process's children leave behind become children of this one, to be killed in the end; on Linux.

    Children that it has by now, as a shell that became this process may have had, are not of the job.
    """
    if _LINUX:
        _older.update(_descendants())
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def state_of(pid: int) -> str:
    """Return a process's state, such as ``R``, ``S``, ``T``, ``Z``; empty where it is gone, ``?`` if nobody knows."""
    return _state_and_parent(pid)[0] if _LINUX else "?"


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    state, parent, *_ = status.rpartition(")")[2].split()
    return state, int(parent)


def kill_descendants() -> None:
    """Kill all processes below this one but those older than the job, and wait until they are gone; on Linux.

    They are looked at one after the other. One whose parent ends meanwhile may seem to be below nobody, until the next
    look, for which it has been adopted.
    """
    until = time.monotonic() + _KILL_SECONDS
    empty_looks = 0
    while _LINUX and empty_looks < 2 and time.monotonic() < until:
        left = _descendants()
        empty_looks = 0 if left else empty_looks + 1
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01 if left else 0.0)


def _descendants() -> list[int]:
    """List what of the job lives below this process; an ended child that nobody has waited for does not."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  (names are what is wanted)
        if entry.isdigit():
            state, parent = _state_and_parent(int(entry))
            if state not in {"", "Z"} and int(entry) not in _older:
                children.setdefault(parent, []).append(int(entry))
    found, parents = [], [os.getpid()]
    while parents:
        parents = [child for parent in parents for child in children.get(parent, ())]
        found += parents
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
