# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmark measures, and how fast each must be; how its figures are written down."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import Rule, rule_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SINGLE = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """One reduction, of one leaf or of many.

    Attributes:
        sizes: bytes of one buffer, for each leaf.
        share: of the copy's bandwidth that it must reach; None for none.
        enqueue: microseconds of host time that it may take; None for any.
        of_one: how many times longer than one leaf of the same total it may take; None for any.
    """

    op: ReduceOp
    dtype: np.dtype[Any]
    count: int
    sizes: tuple[int, ...]
    accumulate: Accumulate = "native"
    share: float | None = None
    enqueue: float | None = None
    of_one: float | None = None

    @property
    def name(self) -> str:
        many = f"{len(self.sizes)} leaves, " if len(self.sizes) > 1 else ""
        wide = ", in float64" if self.accumulate == "float64" else ""
        return f"{self.op.name} {self.dtype.name} n={self.count}, {many}{in_units(sum(self.sizes))}{wide}"

    @property
    def rule(self) -> Rule:
        return rule_for(self.op, self.dtype, self.accumulate)

    @property
    def moved(self) -> int:
        """Bytes that it reads and writes."""
        total = sum(self.sizes)
        return total * self.count + total // self.dtype.itemsize * self.rule.result.itemsize

    def smaller(self, by: int) -> Case:
        """Return the same on leaves of so many times fewer bytes, in whole elements."""
        sizes = tuple(max(size // by // 16, 1) * 16 for size in self.sizes)
        return dataclasses.replace(self, sizes=sizes)


def leaves() -> tuple[int, ...]:
    """Return the sizes of 160 leaves from 1 KiB to 4 MiB, as a model's gradients have them: most are small."""
    return tuple(KIB * round(2 ** (12 * (i % 16) / 15)) for i in range(160))


def cases() -> list[Case]:
    """Return all that is measured, the quick ones first: a run that ends early has those."""
    large: list[tuple[ReduceOp, np.dtype[Any], int, int, Accumulate, float]] = [
        (ReduceOp.SUM, SINGLE, 2, GIB, "native", 0.90),
        (ReduceOp.SUM, SINGLE, 8, 256 * MIB, "native", 0.90),
        (ReduceOp.SUM, BFLOAT16, 8, 256 * MIB, "native", 0.90),
        (ReduceOp.SUM, np.dtype(np.float64), 8, 256 * MIB, "native", 0.85),
        (ReduceOp.SUM, np.dtype(np.int32), 8, 256 * MIB, "native", 0.85),
        (ReduceOp.MAX, SINGLE, 8, 256 * MIB, "native", 0.85),
        (ReduceOp.SUM, SINGLE, 8, 256 * MIB, "float64", 0.85),
        (ReduceOp.MEAN, SINGLE, 8, 256 * MIB, "native", 0.85),
        (ReduceOp.SUM, np.dtype(np.float16), 8, 256 * MIB, "native", 0.85),
        (ReduceOp.SUM, SINGLE, 16, 64 * MIB, "native", 0.80),
        (ReduceOp.SUM, SINGLE, 64, 16 * MIB, "native", 0.80),
        (ReduceOp.SUM, SINGLE, 256, 8 * MIB, "native", 0.80),
    ]
    small = [4 * KIB, 64 * KIB, 256 * KIB, MIB]
    return [
        *[Case(ReduceOp.SUM, SINGLE, n, (size,), enqueue=10.0) for size in small for n in (2, 8)],
        Case(ReduceOp.SUM, SINGLE, 4, leaves(), of_one=1.25),
        *[Case(op, dtype, n, (size,), wide, share=share) for op, dtype, n, size, wide, share in large],
    ]


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of a case.

    Attributes:
        enqueue: microseconds of host time.
        device: microseconds of device time.
        share: of the copy's bandwidth.
        bits: whether the result had the bits of the CPU tier.
        of_one: how many times longer than one leaf of the same total it took; None where it has one leaf.
        others: microseconds of device time that others took, by name.
        anew: microseconds of host time where arrays lie where none lay before.
    """

    case: Case
    enqueue: float
    device: float
    share: float
    bits: bool
    of_one: float | None
    others: Mapping[str, float]
    anew: float = 0.0

    def failed(self) -> list[str]:
        """Return what it falls short of."""
        case = self.case
        found = [] if self.bits else ["other bits than on the CPU"]
        if case.share is not None and self.share < case.share:
            found.append(f"{self.share:.0%} of the copy, not {case.share:.0%}")
        if case.enqueue is not None and self.enqueue > case.enqueue:
            found.append(f"{self.enqueue:.1f} µs to enqueue, not {case.enqueue:.0f}")
        if case.of_one is not None and self.of_one is not None and self.of_one > case.of_one:
            found.append(f"{self.of_one:.2f} times one leaf, not {case.of_one}")
        return found + [f"{name} takes {time:.1f} µs" for name, time in self.others.items() if time < self.device]


def in_units(nbytes: int) -> str:
    """Return a number of bytes for a person."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def as_markdown(
    about: Mapping[str, str], rows: Sequence[Row], left_out: Sequence[Case], failures: Mapping[str, str]
) -> str:
    """Return the table, with what it was measured on above it."""
    names = list(dict.fromkeys(name for row in rows for name in row.others))
    head = [
        "reduction",
        "enqueue, µs",
        "elsewhere, µs",
        "device, µs",
        "of the copy",
        *(f"{name}, µs" for name in names),
        "gate",
    ]
    lines = [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        others = [f"{row.others[name]:.1f}" if name in row.others else "" for name in names]
        gate = "; ".join(row.failed()) or "met"
        times = [f"{time:.1f}" for time in (row.enqueue, row.anew, row.device)]
        cells = [row.case.name, *times, f"{row.share:.0%}", *others, gate]
        lines.append(f"| {' | '.join(cells)} |")
    if failures:
        lines += ["", *(f"- {name} failed: {what.splitlines()[0]}" for name, what in failures.items())]
    if left_out:
        lines += ["", f"Left out, for want of time: {'; '.join(case.name for case in left_out)}."]
    return "\n".join(lines) + "\n"


def as_json(
    about: Mapping[str, str], rows: Sequence[Row], left_out: Sequence[Case], failures: Mapping[str, str]
) -> str:
    """Return the same for programs."""
    found = [
        {
            "reduction": row.case.name,
            "enqueue_us": row.enqueue,
            "enqueue_elsewhere_us": row.anew,
            "device_us": row.device,
            "share_of_copy": row.share,
            "bits": row.bits,
            "of_one_leaf": row.of_one,
            "others_us": dict(row.others),
            "failed": row.failed(),
        }
        for row in rows
    ]
    left = [case.name for case in left_out]
    return json.dumps({"about": dict(about), "rows": found, "left_out": left, "failures": dict(failures)}, indent=1)


def write(
    folder: Path,
    about: Mapping[str, str],
    rows: Sequence[Row],
    left_out: Sequence[Case] = (),
    failures: Mapping[str, str] | None = None,
) -> None:
    """Write both into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = failures or {}
    (folder / "cuda-reductions.md").write_text(as_markdown(about, rows, left_out, failures), encoding="utf-8")
    (folder / "cuda-reductions.json").write_text(as_json(about, rows, left_out, failures), encoding="utf-8")
