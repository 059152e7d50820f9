"""What a call is called in a trace file, and how many bytes it brings."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.signature import KIND, Signature, leaf_fields
from aiodist.collective.wording import shown
from aiodist.tools.tracing.recording import Call

_PYTHON_NUMBERS = {complex: 16, bool: 1}


class Texts(NamedTuple):
    """A call in words: its kind, with its arguments, and its place; and the bytes that it brings."""

    kind: str
    call: str
    at: str
    nbytes: int


class Wording:
    """Puts calls into words, each only once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Call, str], Texts] = {}

    def of(self, call: Call) -> Texts:
        """Return a call in words."""
        key = call, call[1].co_filename  # code objects of two files can be equal
        found = self._known.get(key)
        if found is None:
            signature, code, offset = call
            found = self._known[key] = Texts(
                signature[KIND].name, call_text(signature), shown(location(code, offset)), _bytes_of(signature)
            )
        return found


def _bytes_of(signature: Signature) -> int:
    """Return the bytes of the leaves; those whose size the signature does not tell count as none."""
    total = 0
    for shape, dtype, _ in leaf_fields(signature):
        item = _PYTHON_NUMBERS.get(dtype, 8) if isinstance(dtype, type) else np.dtype(dtype).itemsize
        total += item * math.prod(size or 0 for size in shape)
    return total
