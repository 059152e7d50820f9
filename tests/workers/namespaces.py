"""Machines, as far as one can have them on one: network namespaces on a bridge, with names and folders of their own.

A fake `ssh` enters them, with the environment that a login would have, and hands its words to a shell as ssh does. So
`aiodist run --hosts` works over them as over machines. Needs Linux, its super-user, and `ip`, `bridge` and `unshare`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from pathlib import Path

_SSH = """#!/bin/sh
# ssh [options] HOST COMMAND...: HOST is a number in the namespaces' network
while :; do
    case "$1" in
        -[bceFiIlmopQRSw]) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=${1#*@}; shift
name={prefix}${host##*.}
exec ip netns exec "$name" unshare --uts --mount env -i HOME="$HOME" PATH=/usr/bin:/bin {mark} \
    sh -c 'hostname "$0"; mount -t tmpfs none "{notes}"; cd; eval "$1"' "$name" "$*"
"""


def why_not() -> str | None:
    """Return why there can be no namespaces here; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and its super-user"
    missing = [tool for tool in ("ip", "bridge", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "name", "try0", "type", "bridge"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"network namespaces are not permitted: {tried.stderr.strip()}"


@dataclass(frozen=True)
class Machines:
    """Namespaces that reach each other.

    Attributes:
        prefix: what their names begin with.
        numbers: their IP numbers; the first is where jobs are started.
        folder: for a fake ssh, and for a job's notes.
    """

    prefix: str
    numbers: Sequence[str]
    folder: Path

    @property
    def enter(self) -> list[str]:
        """What a command begins with that runs on the first machine."""
        name = f"{self.prefix}1"
        return [
            "ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh",
        ]  # fmt: skip

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of the job's launcher needs."""
        notes = str(self.folder / "notes")
        return {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "TMPDIR": notes}

    def cut(self, *machines: int) -> None:
        """Let machines not reach each other any more; others still reach them."""
        for machine in machines:
            _run("bridge", "link", "set", "dev", f"{self.prefix}v{machine + 1}", "isolated", "on")


@contextlib.contextmanager
def machines(count: int, folder: Path, mark: str = "") -> Iterator[Machines]:
    """Make some machines.

    Args:
        count: how many.
        folder: an empty one.
        mark: a variable to be set on the other machines, "NAME=value".
    """
    prefix = f"ad{os.getpid()}{chr(ord('a') + next(_networks))}"
    made = Machines(prefix, [f"10.213.{os.getpid() % 250}.{k + 1}" for k in range(count)], folder)
    (folder / "notes").mkdir()
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(_SSH.replace("{prefix}", prefix).replace("{mark}", mark).replace("{notes}", str(folder / "notes")))
    ssh.chmod(0o755)
    try:
        _run("ip", "link", "add", f"{prefix}br", "type", "bridge")
        _run("ip", "link", "set", f"{prefix}br", "up")
        for k, number in enumerate(made.numbers, 1):
            _run("ip", "netns", "add", f"{prefix}{k}")
            _run("ip", "link", "add", f"{prefix}v{k}", "type", "veth", "peer", "eth0", "netns", f"{prefix}{k}")
            _run("ip", "link", "set", f"{prefix}v{k}", "master", f"{prefix}br", "up")
            inside = ("ip", "-n", f"{prefix}{k}")
            _run(*inside, "addr", "add", f"{number}/24", "dev", "eth0")
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", "eth0", "up")
        yield made
    finally:
        for k in range(1, count + 1):
            subprocess.run(["ip", "netns", "del", f"{prefix}{k}"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{prefix}br"], check=False, capture_output=True)


_networks = count_from(0)  # what has been deleted goes a moment later, so that no name is used twice


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
