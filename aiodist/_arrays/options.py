"""How collectives are carried out, as far as a user may say: never what they mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from aiodist_kernels import Accumulate

_IMPLEMENTATIONS = ("auto", "ring", "nccl")
_ACCUMULATORS = ("native", "float64")
_REDUCTIONS = ("fast", "ordered")


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of collectives. They are not compared between replicas and never change what a collective means.

    Attributes:
        bytes_per_pack: how many bytes of consecutive leaves a large reduction takes at a time; a pack closes when it
            has more, as in TensorFlow. 0 lets aiodist choose. Never changes a result; replica 0's choice counts.
        timeout_seconds: raise `CollectiveTimeoutError` this long after the first arrival, in seconds; None waits.
        implementation: "auto", "ring" or "nccl", in any case: a hint, as in TensorFlow, that never changes anything.
        accumulate: "native", or "float64" for float32, float16 and bfloat16 sums and products that are accumulated
            in float64 and rounded once; replica 0's choice counts.
        reduction: "fast", or "ordered" for reductions over several workers that give the same bits for every layout
            of the same replicas over workers; a setting of the strategy's, which calls do not change.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of its range.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: str = "auto"
    accumulate: Accumulate = "native"
    reduction: str = "fast"

    def __post_init__(self) -> None:
        _check_bytes(self.bytes_per_pack)
        if self.timeout_seconds is not None:
            _check_timeout(self.timeout_seconds)
        object.__setattr__(self, "implementation", _choice("implementation", self.implementation, _IMPLEMENTATIONS))
        object.__setattr__(self, "accumulate", _choice("accumulate", self.accumulate, _ACCUMULATORS))
        object.__setattr__(self, "reduction", _choice("reduction", self.reduction, _REDUCTIONS))

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options with those of ``options`` that are not at their default put over them.

        Raises:
            TypeError: ``options`` are none.
        """
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise TypeError(f"merge expects CommunicationOptions or None, got {options!r}")
        changed = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}
        return replace(self, **changed) if changed else self


def _check_bytes(number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"bytes_per_pack must be an int, got {number!r}")
    if number < 0:
        raise ValueError(f"bytes_per_pack must be 0 or more, got {number}")


def _check_timeout(seconds: Any) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout_seconds must be a number of seconds or None, got {seconds!r}")
    if not seconds > 0 or math.isnan(seconds):
        raise ValueError(f"timeout_seconds must be more than 0, or None to wait, got {seconds!r}")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, one of {', '.join(map(repr, choices))}, got {value!r}")
    if value.lower() not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value.lower()
