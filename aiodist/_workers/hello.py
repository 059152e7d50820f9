"""What each worker says of itself when the workers of a strategy meet, as JSON."""

from __future__ import annotations

import json
import os
import platform
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from aiodist._core.text import ids_briefly
from aiodist._version import __version__


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself.

    Attributes:
        version: of aiodist.
        devices: its replicas'.
        host: its machine's name.
        machine: its machine, and what of that it sees: those with the same one reach each other over loopback.
        pid: its process.
        place: where it makes the strategy, file and line.
    """

    version: str
    devices: tuple[str, ...]
    host: str
    machine: str
    pid: int
    place: str = ""

    @classmethod
    def of_this_process(cls, devices: Sequence[str], place: str) -> Hello:
        """Return this process's."""
        return cls(__version__, tuple(devices), platform.node(), this_machine(), os.getpid(), place)

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello:
        """Return what `to_bytes` gave."""
        fields = json.loads(data)
        return cls(**{**fields, "devices": tuple(fields["devices"])})


@cache
def this_machine() -> str:
    """Return what tells this machine, as this process sees it, from others; containers see their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])  # noqa: PTH115
    except OSError:  # not Linux
        return f"{platform.node()} {uuid.getnode()}"


def check_versions(hellos: Sequence[Hello]) -> None:
    """Refuse workers with another aiodist: what they tell each other would not fit.

    Raises:
        RuntimeError: there are some.
    """
    found = _alike([hello.version for hello in hellos])
    if len(found) > 1:
        who = "; ".join(f"{version} on {workers}" for version, workers in found.items())
        raise RuntimeError(f"the workers have different versions of aiodist: {who}. Install the same one for all")


def made_differently(hellos: Sequence[Hello]) -> str:
    """Say so, where the workers have made a strategy at different places; which may be meant."""
    found = _alike([hello.place for hello in hellos])
    if len(found) < 2:
        return ""
    *others, last = [f"by {workers} at {place}" for place, workers in found.items()]
    return (
        f"The strategy was made {', '.join(others)} and {last}: strategies pair up in the order in which each worker "
        "makes them."
    )


def _alike(texts: Sequence[str]) -> dict[str, str]:
    """Return the workers that have said each text."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return {text: ids_briefly(found).replace("replica", "worker") for text, found in ranks.items()}
