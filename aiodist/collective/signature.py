"""Signatures: what a collective call asks for, as one tuple that is cheap to build and to compare.

A replica's k-th call is compared with the others' k-th by ``==`` on these tuples, hundreds of thousands of times a
second, so they are plain tuples with their fields at fixed positions and no class of their own. Only when two differ
is meaning compared, field by field (a big-endian float32 is a float32). For a single leaf, the commonest value,
``STRUCTURE`` is None and the fields of leaves hold the leaf's own; for a nest they hold a tuple with one item a leaf.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from aiodist._arrays.leaves import LeafMark
from aiodist._core.report import Reason

Signature: TypeAlias = tuple[Any, ...]

# Positions. DETAIL is the axis, the source or the merge function, as the kind says.
KIND: Final = 0
OP: Final = 1
DETAIL: Final = 2
NAME: Final = 3
STRUCTURE: Final = 4
SHAPES: Final = 5
DTYPES: Final = 6
TYPES: Final = 7
PATH: Final = 8


def first_difference(a: Signature, b: Signature) -> Reason | None:  # noqa: PLR0911  (one return a field)
    """Return the first thing in which two signatures differ in meaning, call sites left out; None where they agree."""
    if a[KIND] is not b[KIND]:
        return Reason.KIND
    if a[NAME] != b[NAME]:
        return Reason.NAME
    if a[OP] is not b[OP]:
        return Reason.REDUCE_OP
    if a[DETAIL] != b[DETAIL] and not _same_axis_of_other_ranks(a, b):
        detail: Reason = a[KIND].detail
        return detail
    if a[STRUCTURE] != b[STRUCTURE]:
        return Reason.STRUCTURE
    if a[SHAPES] != b[SHAPES]:
        return Reason.SHAPE
    if _native(a[DTYPES]) != _native(b[DTYPES]):
        return Reason.DTYPE
    if a[TYPES] != b[TYPES]:
        return Reason.DEVICE
    return None


def meaning(signature: Signature) -> tuple[Any, ...]:
    """Return a signature without what does not count: byte order and the call path."""
    return (*signature[:DTYPES], _native(signature[DTYPES]), signature[TYPES])


def _same_axis_of_other_ranks(a: Signature, b: Signature) -> bool:
    """Whether the axes may differ only because they were counted from the end of values of unequal rank."""
    if a[KIND].detail is not Reason.AXIS:
        return False
    return [len(shape) for shape, *_ in leaf_fields(a)] != [len(shape) for shape, *_ in leaf_fields(b)]


def _native(dtypes: Any) -> Any:
    if isinstance(dtypes, tuple):
        return tuple(_native(dtype) for dtype in dtypes)
    return dtypes.newbyteorder("=") if isinstance(dtypes, np.dtype) else dtypes


def leaf_fields(signature: Signature) -> list[tuple[tuple[int, ...], Any, LeafMark]]:
    """Return shape, dtype and leaf type of every leaf; a size that is not compared is None in the shape."""
    if signature[SHAPES] is None:
        return []
    if signature[STRUCTURE] is None:
        return [(signature[SHAPES], signature[DTYPES], signature[TYPES])]
    types = signature[TYPES] or (None,) * len(signature[SHAPES])
    return list(zip(signature[SHAPES], signature[DTYPES], types, strict=True))
