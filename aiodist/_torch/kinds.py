"""What each collective asks for, and what it computes.

`compute` carries a collective out on all ranks' contributions once every rank has come. Reductions are left folds in
the order of ranks, in the tensors' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from itertools import chain
from typing import Any, Final, TypeAlias

from aiodist._core.call import MESSAGE, Call
from aiodist._torch.private import torch
from aiodist._torch.report import call_of_tensors

Tensor: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a rank contributes to a collective: the call, the tensors that are read, and those that are written.

    `root` is the root's rank in the group; -1 where there is none.
    """

    call: Call
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    root: int = -1


_call = cache(call_of_tensors)


def call(
    kind: str,
    tensors: Sequence[Tensor] = (),
    *,
    op: str | None = None,
    root: int | None = None,
    rows: bool = True,
    role: str = "",
) -> Call:
    """Return the call of a collective; equal ones are one object.

    Shapes and dtypes of the tensors must agree, but for sizes along axis 0 without `rows`. `root` is the root's rank in
    the job, `role` what this side is called, where sides differ.
    """
    shapes = tuple(tuple(t.shape) if rows or not t.dim() else (None, *t.shape[1:]) for t in tensors)
    dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
    return _call(kind, shapes, dtypes, op=op, source=root, role=role)


# Reductions.


def _fold(function: Callable[[Tensor, Tensor], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    return reduce(function, tensors[1:], tensors[0].clone())


def _average(tensors: Sequence[Tensor]) -> Tensor:
    total = _fold(torch.add, tensors)
    whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, len(tensors), rounding_mode="trunc" if whole else None)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return _fold(torch.logical_or if tensors[0].dtype is torch.bool else torch.add, tensors)


_REDUCTIONS: Final[Mapping[str, Callable[[Sequence[Tensor]], Tensor]]] = {
    "SUM": _sum,
    "AVG": _average,
    **{name: partial(_fold, getattr(torch, function)) for name, function in (
        ("PRODUCT", "mul"), ("MIN", "minimum"), ("MAX", "maximum"), ("BAND", "bitwise_and"), ("BOR", "bitwise_or"),
        ("BXOR", "bitwise_xor"),
    )},
}  # fmt: skip


def op_name(op: Any) -> str:
    """Return the name of a reduce op, e.g. ``SUM``.

    Raises:
        NotImplementedError: it cannot be carried out.
    """
    name: str = getattr(op, "op", op).name
    if name not in _REDUCTIONS:
        raise NotImplementedError(f"aiodist check cannot carry out ReduceOp.{name}")
    return name


# What each kind computes.


def compute(members: Sequence[Contribution]) -> None:
    """Carry a collective out.

    Raises:
        ValueError: what a rank is to get is not as large as what it has for it.
    """
    kind = members[0].call.kind
    with torch.no_grad():
        results = _results(kind, members)  # before anything is written: an input may be a part of an output
        for rank, (member, values) in enumerate(zip(members, results, strict=True)):
            for number, (output, value) in enumerate(zip(member.outputs, values, strict=False)):
                _write(output, value, f"{kind}: rank {rank} of the group is sent, as part {number},")


def _results(kind: str, members: Sequence[Contribution]) -> Sequence[Sequence[Tensor]]:  # noqa: PLR0911  (one a kind)
    """Return what each member gets; those without outputs take nothing."""
    size, op, root = len(members), members[0].call.op or "SUM", members[0].root
    inputs = [member.inputs for member in members]
    match kind:
        case "all_reduce" | "reduce":
            return [_reduced(op, inputs)] * size
        case "reduce_scatter":  # the inputs are all ranks' first ones, then second, as are the outputs of all_gather
            reduced = _reduced(op, inputs)
            return [reduced[rank::size] for rank in range(size)]
        case "broadcast":
            return [_cloned(inputs[root])] * size
        case "scatter":
            return [[tensor] for tensor in _cloned(inputs[root])]
        case "all_gather" | "gather":
            return [_cloned(chain.from_iterable(zip(*inputs, strict=True)))] * size
        case "all_to_all":
            return [_cloned(column) for column in zip(*inputs, strict=True)]
        case _:
            return [(), _cloned(inputs[0])] if kind == MESSAGE else [()] * size  # a barrier


def _reduced(op: str, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [_REDUCTIONS[op](column) for column in zip(*inputs, strict=True)]


def _cloned(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _write(output: Tensor, value: Tensor, received: str) -> None:
    if value.shape != output.shape:
        if value.numel() != output.numel():
            raise ValueError(f"{received} {list(value.shape)}, but expects {list(output.shape)}")
        value = value.reshape(output.shape)
    (output if output.is_sparse else output.detach()).copy_(value)  # autograd must not see the writing


def parts(tensor: Tensor, sizes: Iterable[int], size: int) -> Sequence[Tensor]:
    """Return a tensor's parts along axis 0: of these sizes, or, where there are none, as many equal ones as ranks.

    Raises:
        RuntimeError: it cannot be cut so.
    """
    cuts = list(sizes) or [tensor.shape[0] // size] * size
    found: Sequence[Tensor] = tensor.split(cuts)
    return found
