"""What a call asks for, as a person reads it: ``all_reduce(SUM, {'b': float32[128], 'w': float32[64, 128]})``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, LeafType
from aiodist._core.report import Reason
from aiodist.collective import signature as sig
from aiodist.collective.signature import Signature

_MAX_NEST = 100


class FunctionKey(NamedTuple):
    """What makes two merge functions the same: their code (its file too), or for callable objects their type."""

    file: str
    code: Any
    name: str


class _Text:
    """A leaf whose repr is the given text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def leaf_text(shape: tuple[int | None, ...], dtype: Any, leaf_type: LeafMark) -> str:
    """Return a leaf as ``float32[3]``; a Python number as ``float``; a NumPy scalar as ``np.float32``.

    Rows of a whole of that shape are ``IndexedSlices(float32[1000, 16])``, a PyTorch tensor is ``torch.float32[3]``.
    """
    if leaf_type == LeafType.PYTHON_NUMBER:
        return str(dtype.__name__)
    name = dtype.newbyteorder("=").name if isinstance(dtype, np.dtype) else str(dtype)
    if leaf_type == LeafType.NUMPY_SCALAR:
        return f"np.{name}"
    array = f"{name}[{', '.join('*' if size is None else str(size) for size in shape)}]"
    if isinstance(leaf_type, DeviceType):
        return f"{leaf_type.name}.{array} on a GPU"
    if isinstance(leaf_type, HostType):
        return f"{leaf_type.name}.{array}"
    return f"IndexedSlices({array})" if leaf_type == LeafType.INDEXED_SLICES else array


def call_text(signature: Signature) -> str:
    """Return a call as text, kind and arguments."""
    kind = signature[sig.KIND]
    arguments = [signature[sig.OP].name] if signature[sig.OP] is not None else []
    if signature[sig.SHAPES] is not None:
        arguments.append(_nest_text(signature))
    if signature[sig.DETAIL] is not None:
        arguments.append(_detail_text(kind.detail, signature))
    if signature[sig.NAME] is not None:
        arguments.append(f"name={signature[sig.NAME]!r}")
    return f"{kind.name}({', '.join(arguments)})"


def _nest_text(signature: Signature) -> str:
    leaves = [_Text(leaf_text(*fields)) for fields in sig.leaf_fields(signature)]
    structure = signature[sig.STRUCTURE]
    if structure is None:
        return leaves[0].text
    text = repr(_in_order_of_keys(structure, iter(leaves)))
    return text if len(text) <= _MAX_NEST else f"{text[: _MAX_NEST - 2]} … ({len(leaves)} leaves)"


def _in_order_of_keys(structure: nests.Structure, leaves: Iterator[Any]) -> Any:
    """Return a nest, its dicts in the order of their leaves: as a text it does not tell which replica came first."""
    if structure.is_leaf():
        return next(leaves)
    children = [_in_order_of_keys(child, leaves) for child in structure.children()]
    if structure.type is dict:
        return dict(zip(structure.entries(), children, strict=True))
    level = structure.one_level()
    assert level is not None, "only a leaf has none"
    return level.unflatten(children)


def _detail_text(detail: Reason, signature: Signature) -> str:
    value = signature[sig.DETAIL]
    if detail is Reason.SOURCE:
        return f"source={value}"
    if detail is Reason.MERGE_FN:
        return str(value.name)
    if signature[sig.SHAPES] is None:
        return str(list(value))  # the replicas of a new group
    per_leaf = [value] if signature[sig.STRUCTURE] is None else list(value)
    shown = per_leaf[0] if len(set(per_leaf)) == 1 else tuple(per_leaf)
    if signature[sig.KIND].name == "all_to_all" and len(set(per_leaf)) == 1:
        return f"split_axis={shown[0]}, concat_axis={shown[1]}"
    return f"axis={shown}"
