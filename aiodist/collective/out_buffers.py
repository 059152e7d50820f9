"""What replicas bring for a result."""

from __future__ import annotations

from typing import Any, NamedTuple


class OutBuffers(NamedTuple):
    """A replica's own buffers for a result: the leaves as they are written into, and the nest that they are in."""

    leaves: list[Any]
    nest: Any
