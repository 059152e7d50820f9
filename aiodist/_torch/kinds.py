"""What each collective asks for, and what it computes.

A `Contribution` is what one rank contributes: the call that is compared, the tensors that are read, and those that are
written. `compute` carries a collective out on all ranks' contributions once every rank has come. Reductions are left
folds in the order of ranks, in the tensors' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

from aiodist._core.call import LEAF, MESSAGE, Call
from aiodist._torch.private import torch

Tensor: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a rank contributes to a collective.

    Attributes:
        call: what it asks for.
        inputs: the tensors that are read.
        outputs: the tensors that are written; often the same.
        root: the root's rank in the group; -1 where there is none.
    """

    call: Call
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    root: int = -1


_calls: dict[Any, Call] = {}


def call(
    kind: str,
    tensors: Sequence[Tensor] = (),
    *,
    op: str | None = None,
    root: int | None = None,
    rows: bool = True,
    **more: Any,
) -> Call:
    """Return the call of a collective; equal ones are one object.

    Args:
        kind: what is called.
        tensors: those whose shapes and dtypes must agree.
        op: the reduce op.
        root: the root's rank in the job.
        rows: whether sizes along axis 0 must agree, too.
        **more: other fields of `Call`.
    """
    shapes = tuple(tuple(t.shape) if rows or not t.dim() else (None, *t.shape[1:]) for t in tensors)
    dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
    key = (kind, op, root, shapes, dtypes, *more.items())
    found = _calls.get(key)
    if found is None:
        size = len(shapes)
        nest = f"[{', '.join([LEAF] * size)}]"
        found = _calls[key] = Call(
            kind,
            op=op,
            source=root,
            structure=None if size == 1 else nest,
            paths=("",) if size == 1 else tuple(f"[{index}]" for index in range(size)),
            shapes=shapes or None,
            dtypes=dtypes,
            arrays=("array",) * size,
            **more,
        )
    return found


def op_name(op: Any) -> str:
    """Return the name of a reduce op, e.g. ``SUM``."""
    name: str = getattr(op, "op", op).name
    return name


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
    "PRODUCT": lambda tensors: _fold(torch.mul, tensors),
    "MIN": lambda tensors: _fold(torch.minimum, tensors),
    "MAX": lambda tensors: _fold(torch.maximum, tensors),
    "BAND": lambda tensors: _fold(torch.bitwise_and, tensors),
    "BOR": lambda tensors: _fold(torch.bitwise_or, tensors),
    "BXOR": lambda tensors: _fold(torch.bitwise_xor, tensors),
}


def check_op(name: str) -> None:
    """Refuse a reduce op that is not there.

    Raises:
        NotImplementedError: it is not there.
    """
    if name not in _REDUCTIONS:
        raise NotImplementedError(f"aiodist check cannot carry out ReduceOp.{name}")


def _reduced(members: Sequence[Contribution], index: int) -> Tensor:
    return _REDUCTIONS[members[0].call.op or "SUM"]([member.inputs[index] for member in members])


# Kinds. Outputs are written through `detach`: autograd must not see the writing.


def _write(output: Tensor, value: Tensor) -> None:
    output.detach().copy_(value.view(output.shape) if value.shape != output.shape else value)


def _nothing(members: Sequence[Contribution]) -> None:
    """Carry out what moves no values."""


def _all_reduce(members: Sequence[Contribution]) -> None:
    for index in range(len(members[0].inputs)):
        result = _reduced(members, index)
        for member in members:
            _write(member.outputs[index], result)


def _reduce(members: Sequence[Contribution]) -> None:
    for index, output in enumerate(members[members[0].root].outputs):
        _write(output, _reduced(members, index))


def _broadcast(members: Sequence[Contribution]) -> None:
    source = members[members[0].root]
    for member in members:
        if member is not source:
            for output, value in zip(member.outputs, source.inputs, strict=True):
                _write(output, value)


def _all_gather(members: Sequence[Contribution]) -> None:
    """Outputs: one a rank; of several inputs, all ranks' first ones, then all ranks' second ones."""
    size = len(members)
    values = [[value.clone() for value in member.inputs] for member in members]  # an input may be part of the output
    for member in members:
        for index, output in enumerate(member.outputs):
            _write(output, values[index % size][index // size])


def _gather(members: Sequence[Contribution]) -> None:
    for output, member in zip(members[members[0].root].outputs, members, strict=True):
        _write(output, member.inputs[0])


def _scatter(members: Sequence[Contribution]) -> None:
    for member, value in zip(members, members[members[0].root].inputs, strict=True):
        _write(member.outputs[0], value)


def _reduce_scatter(members: Sequence[Contribution]) -> None:
    """Inputs: one a rank; of several outputs, all ranks' first ones, then all ranks' second ones."""
    size = len(members)
    results = [_reduced(members, index) for index in range(len(members[0].inputs))]
    for rank, member in enumerate(members):
        for index, output in enumerate(member.outputs):
            _write(output, results[index * size + rank])


def _all_to_all(members: Sequence[Contribution]) -> None:
    values = [[value.clone() for value in member.inputs] for member in members]
    for rank, member in enumerate(members):
        for source, output in enumerate(member.outputs):
            if values[source][rank].numel() != output.numel():
                raise ValueError(
                    f"all_to_all: rank {source} of the group sends {list(values[source][rank].shape)} to rank {rank}, "
                    f"which expects {list(output.shape)}"
                )
            _write(output, values[source][rank])


def _send(members: Sequence[Contribution]) -> None:
    sender, receiver = sorted(members, key=lambda member: not member.inputs)
    for output, value in zip(receiver.outputs, sender.inputs, strict=True):
        _write(output, value)


_COMPUTE: Final[Mapping[str, Callable[[Sequence[Contribution]], None]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    MESSAGE: _send,
    "barrier": _nothing,
    "monitored_barrier": _nothing,
    "init_process_group": _nothing,
}


def compute(members: Sequence[Contribution]) -> None:
    """Carry a collective out.

    Args:
        members: what each rank of the group contributes, in the order of ranks.
    """
    with torch.no_grad():
        _COMPUTE[members[0].call.kind](members)


def parts(tensor: Tensor, sizes: Iterable[int], size: int) -> list[Tensor]:
    """Return a tensor's parts along axis 0: of these sizes, or, where there are none, as many equal ones as ranks.

    Raises:
        ValueError: it cannot be cut so.
    """
    cuts = list(sizes) or [tensor.shape[0] // size] * size
    if len(cuts) != size or sum(cuts) != tensor.shape[0]:
        raise ValueError(
            f"expected {size} sizes that add up to {tensor.shape[0]} rows, got {cuts}"
            if list(sizes)
            else f"expected a number of rows that {size} ranks can divide, got {tensor.shape[0]}"
        )
    return [tensor[begin:end] for begin, end in pairwise(accumulate(cuts, initial=0))]
