"""What replicas bring to a meeting, as work on devices takes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aiodist._arrays.options import CommunicationOptions
from aiodist.collective.signature import Signature


class Brought(NamedTuple):
    """What replicas ask for together, and what each brings.

    Attributes:
        signature: what they ask for, with device arrays among the leaves.
        values: what those bring that take part.
        options: how the result is to be made.
        positions: their own, in the group.
        names: the devices on whose streams values may have been made.
    """

    signature: Signature
    values: Sequence[Any]
    options: CommunicationOptions
    positions: Sequence[int]
    names: Iterable[str]


class OutBuffers(NamedTuple):
    """A replica's own buffers for a result: the leaves as they are written into, and the nest that they are in."""

    leaves: list[Any]
    nest: Any
