"""Users' options for collectives; they never change what a collective means."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from aiodist_kernels import Accumulate

_IMPLEMENTATIONS = ("auto", "ring", "nccl")
_ACCUMULATORS = ("native", "float64")


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of collectives. They are not compared between replicas and never change what a collective means.

    Attributes:
        bytes_per_pack: 0 or more; a hint, as in TensorFlow, without effect: nests are cut into pieces of equal cost.
        timeout_seconds: a collective raises `CollectiveTimeoutError` this many seconds after the first arrival. The
            smallest value that any replica passes is used. None: no timeout.
        implementation: "auto", "ring" or "nccl", in any case; a hint, as in TensorFlow, without effect.
        accumulate: "native", or "float64", which accumulates float32, float16 and bfloat16 sums and products in float64
            and rounds once; replica 0's value is used.

    Raises:
        TypeError: ``bytes_per_pack`` is not an int, or ``timeout_seconds`` not a number.
        ValueError: a value is out of range.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: str = "auto"
    accumulate: Accumulate = "native"

    def __post_init__(self) -> None:
        integer("bytes_per_pack", self.bytes_per_pack, 0)
        seconds: Any = self.timeout_seconds
        if isinstance(seconds, bool) or (seconds is not None and not hasattr(seconds, "__float__")):
            raise TypeError(f"timeout_seconds must be a number of seconds, or None to wait, got {seconds!r}")
        if seconds is not None and not seconds > 0:  # also refuses NaN
            raise ValueError(f"timeout_seconds must be more than 0, or None to wait, got {seconds!r}")
        object.__setattr__(self, "implementation", choice("implementation", self.implementation, _IMPLEMENTATIONS))
        object.__setattr__(self, "accumulate", choice("accumulate", self.accumulate, _ACCUMULATORS))

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, overridden by those of ``options`` that are not at their defaults.

        Raises:
            TypeError: ``options`` is neither `CommunicationOptions` nor None.
        """
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise TypeError(f"merge expects CommunicationOptions or None, got {options!r}")
        changed = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}
        return replace(self, **changed) if changed else self


def integer(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument as an int, and check that it is one, and neither a bool nor too small."""
    number = None
    if not isinstance(value, bool):
        with suppress(TypeError):  # as an array raises it, too
            number = operator.index(value)
    if number is None:
        raise TypeError(f"{name} must be an int, got {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return an option's value in lower case, and check that it is one of the choices."""
    found = value.lower() if isinstance(value, str) else None
    if found not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return found
