"""What each worker says of itself when the workers of a strategy meet, as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from aiodist._core.text import ids_briefly
from aiodist._version import __version__
from aiodist._workers.addresses import Address


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself.

    Attributes:
        version: of aiodist.
        devices: its replicas' devices.
        host: its machine's name.
        pid: its process.
        address: where it listens for the others' connections, if it does.
        place: where it makes the strategy, file and line.
    """

    version: str
    devices: tuple[str, ...]
    host: str
    pid: int
    address: Address | None
    place: str = ""

    @classmethod
    def of_this_process(cls, devices: Sequence[str], address: Address | None, place: str) -> Hello:
        """Return this process's."""
        return cls(__version__, tuple(devices), platform.node(), os.getpid(), address, place)

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello:
        """Return what `to_bytes` gave."""
        fields = json.loads(data)
        address = fields.pop("address")
        if address is not None:
            address = Address(tuple(address["hosts"]), address["port"], address["token"])
        return cls(**{**fields, "devices": tuple(fields["devices"]), "address": address})


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
