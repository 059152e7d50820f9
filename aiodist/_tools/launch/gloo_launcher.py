"""How the workers of gloo are started, which has no launcher of its own: by `starter`, on other machines by ssh."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aiodist._arrays import environment
from aiodist._tools.launch import starter
from aiodist._tools.usage import UsageError
from aiodist.workers.addresses import own_numbers
from aiodist.workers.gloo import INSTALL

_SSH_SECONDS: Final = 20
_FREE_PORT: Final = "import socket; print('port', socket.create_server(('', 0)).getsockname()[1])"


def places_of(workers: int, hosts: Sequence[str], launcher: str | None) -> list[str]:
    """Return where each worker is to start: the name of another machine, or an empty string for this one.

    Raises:
        UsageError: a launcher is given; PyTorch is not installed, or ssh is needed and is not.
    """
    if launcher is not None:
        raise UsageError("--engine gloo starts workers by itself, on other machines by ssh: it takes no --launcher")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(INSTALL)
    here = {"localhost", socket.gethostname(), *own_numbers()}
    names = ["" if host in here or host.startswith("127.") else host for host in hosts or [""]]
    if any(names) and shutil.which("ssh") is None:
        raise UsageError(f"workers on {', '.join(filter(None, names))} are started by ssh, which is not to be found")
    return [names[rank % len(names)] for rank in range(workers)]


def meeting_of(places: Sequence[str], hosts: Sequence[str]) -> str | None:
    """Return where workers on several machines meet, ``host:port`` of the first one's; None where all are here.

    Raises:
        UsageError: the first one's machine does not answer.
    """
    if not any(places):
        return None
    first, own = hosts[0], own_numbers()
    if own and (first == "localhost" or first.startswith("127.")):
        first = own[0]
    return f"{environment.control_address() or first}:{_free_port(places[0])}"


def _free_port(place: str) -> int:
    """Return a port that nobody uses on a machine: the system gives the same one to nobody else for some time."""
    command = [sys.executable, "-c", _FREE_PORT]
    if place:
        command = [*starter.SSH, place, shlex.join(command)]
    try:
        said = subprocess.run(  # noqa: S603  (the user's machine, and ours)
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_SSH_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{place} does not answer to ssh within {_SSH_SECONDS} s") from None
    for line in said.stdout.splitlines():  # a login may say something, too
        if line.startswith("port "):
            return int(line.removeprefix("port "))
    told = said.stderr.strip() or f"{sys.executable} says nothing there, with exit code {said.returncode}"
    raise UsageError(f"the first worker cannot start on {place or 'this machine'}: {told}")


def start_of(places: Sequence[str], settings: dict[str, str]) -> list[str]:
    """Return what the command of workers' agents begins with.

    Args:
        places: where each is to start.
        settings: the environment of all of them, of which ssh takes nothing along by itself.
    """
    passed = [f"{name}={settings[name]}" for name in environment.for_other_machines(settings)]
    elsewhere = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *passed])}" if any(places) else ""
    return [sys.executable, starter.__file__, ",".join(places), elsewhere]
