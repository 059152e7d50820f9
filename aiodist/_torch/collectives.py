"""Collectives on tensors: what each asks for, and what it computes.

Reductions are left folds in the order of ranks, in the tensors' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

from aiodist._core.call import MESSAGE, Call
from aiodist._torch.private import torch
from aiodist._torch.report import call_of_tensors

Tensor: TypeAlias = Any
Tensors: TypeAlias = Sequence[Tensor]

_FOLDS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def op_name(op: Any) -> str:
    """Return the name of a reduce op, e.g. ``SUM``; a NotImplementedError if it cannot be carried out."""
    name: str = getattr(op, "op", op).name
    if name not in _FOLDS:
        raise NotImplementedError(f"aiodist check cannot carry out ReduceOp.{name}")
    return name


def call_on(tensors: Tensors, kind: str, *, rows: bool = True, **more: Any) -> Call:
    """Return the call of a collective; equal ones are one object.

    Shapes and dtypes of the tensors must agree on all ranks; without ``rows``, sizes along axis 0 may differ. ``more``
    are other fields of `Call`.
    """
    shapes = tuple(tuple(t.shape) if rows or not t.dim() else (None, *t.shape[1:]) for t in tensors)
    dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
    return call_of_tensors(kind, shapes, dtypes, **more)


def compute(call: Call, root: int, inputs: Sequence[Tensors], outputs: Sequence[Tensors]) -> None:
    """Carry out a collective: read each rank's inputs, and write each rank's outputs, by position in the group.

    The root's position counts if the kind has a root. A ValueError says that a rank expects more or less than it gets.
    """
    with torch.no_grad():
        results = _results(call, root, inputs)  # before anything is written: an input may be a part of an output
        for rank, (own, values) in enumerate(zip(outputs, results, strict=True)):
            for part, (output, value) in enumerate(zip(own, values, strict=False)):
                if value.numel() != output.numel():
                    sent = f"rank {rank} of the group is sent {list(value.shape)} as part {part}"
                    raise ValueError(f"{call.kind}: {sent}, but expects {list(output.shape)}")
                shaped = value if value.shape == output.shape else value.reshape(output.shape)
                (output if output.is_sparse else output.detach()).copy_(shaped)  # autograd must not see the writing


def _results(call: Call, root: int, inputs: Sequence[Tensors]) -> Sequence[Tensors]:  # noqa: PLR0911  (one per kind)
    """Return what each rank receives; a rank without outputs ignores its own."""
    size, op = len(inputs), call.op or "SUM"
    match call.kind:
        case "all_reduce" | "reduce":
            return [[_reduced(op, column) for column in zip(*inputs, strict=True)]] * size
        case "reduce_scatter":  # the inputs are all ranks' first ones, then second, as are the outputs of all_gather
            reduced = [_reduced(op, column) for column in zip(*inputs, strict=True)]
            return [reduced[rank::size] for rank in range(size)]
        case "broadcast":
            return [_cloned(inputs[root])] * size
        case "scatter":
            return [[tensor] for tensor in _cloned(inputs[root])]
        case "all_gather" | "gather":
            return [_cloned(tensor for column in zip(*inputs, strict=True) for tensor in column)] * size
        case "all_to_all":
            return [_cloned(column) for column in zip(*inputs, strict=True)]
        case _ if call.kind == MESSAGE:
            return [(), _cloned(inputs[0])]
    return [()] * size  # a barrier


def _reduced(op: str, column: Tensors) -> Tensor:
    first, *others = column
    fold = torch.logical_or if op == "SUM" and first.dtype is torch.bool else _FOLDS[op]
    total = reduce(fold, others, first.clone())
    if op != "AVG":
        return total
    is_whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, len(column), rounding_mode="trunc" if is_whole else None)


def _cloned(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]
