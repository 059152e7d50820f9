"""Joining: the first meeting of a strategy's workers: each tells of its replicas and where it can be reached."""

from __future__ import annotations

import os
import platform
import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from aiodist.vocabulary import environment
from aiodist.workers.coding import decode, encode
from aiodist.workers.communicator import Communicator
from aiodist.workers.layout import Layout

_SIZE: Final = 16384


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker tells of itself.

    Attributes:
        devices: its replicas' devices.
        host: its machine's name.
        pid: its process.
        address: where its control plane listens, if it does.
        agent: where the agent beside it answers, "port:token"; None where there is none.
    """

    devices: tuple[str, ...]
    host: str
    pid: int
    address: Any
    agent: str | None = None

    @classmethod
    def of_this_process(cls, devices: tuple[str, ...], address: Any) -> Hello:
        """Return this process's."""
        return cls(devices, platform.node(), os.getpid(), address, environment.agent())


class Joining:
    """A first meeting, begun by its construction.

    Args:
        communicator: the strategy's own.
        hello: what this worker tells.

    Raises:
        ValueError: that is too much.
    """

    def __init__(self, communicator: Communicator, hello: Hello) -> None:
        self._communicator = communicator
        told = encode(zlib.compress(encode(hello).tobytes()))
        if len(told) > _SIZE:
            raise ValueError(f"a worker has at most some thousand devices, got {len(hello.devices)}")
        own = np.zeros(_SIZE, np.uint8)
        own[: len(told)] = told
        self._own = own
        self._all = np.zeros(_SIZE * communicator.size, np.uint8)
        self._request = communicator.iallgather(own, self._all)

    def hellos(self) -> list[Hello]:
        """Wait for all workers, and return what they tell, by rank."""
        self._communicator.wait(self._request)
        parts = self._all.reshape(-1, _SIZE)
        return [decode(np.frombuffer(zlib.decompress(decode(part)), np.uint8)) for part in parts]

    def layout(self) -> Layout:
        """Wait for all workers, and return their layout."""
        return Layout(self._communicator.rank, [hello.devices for hello in self.hellos()])
