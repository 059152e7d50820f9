"""What each collective asks for, and what it computes.

`compute` carries a collective out on all ranks' contributions once every rank has come. Reductions are left folds in
the order of ranks, in the tensors' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

from aiodist._core.call import MESSAGE, Call
from aiodist._torch.private import torch
from aiodist._torch.wording import call_of_tensors

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


_calls: dict[Any, Call] = {}


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
    key = kind, op, root, shapes, dtypes, role
    found = _calls.get(key)
    if found is None:
        found = _calls[key] = call_of_tensors(kind, shapes, dtypes, op=op, source=root, role=role)
    return found


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


def op_name(op: Any) -> str:
    """Return the name of a reduce op, e.g. ``SUM``.

    Raises:
        NotImplementedError: it cannot be carried out.
    """
    name: str = getattr(op, "op", op).name
    if name not in _REDUCTIONS:
        raise NotImplementedError(f"aiodist check cannot carry out ReduceOp.{name}")
    return name


# What each kind computes: where an output's value comes from, as a member and which of its inputs; or, for -1, the
# reduction of all members' inputs of that number.

_REDUCED: Final = -1
_SOURCES: Final[Mapping[str, Callable[[int, int, int, int], tuple[int, int]]]] = {
    # member, output, size, root
    "all_reduce": lambda _, output, __, ___: (_REDUCED, output),
    "reduce": lambda _, output, __, ___: (_REDUCED, output),
    "broadcast": lambda _, output, __, root: (root, output),
    "all_gather": lambda _, output, size, __: (output % size, output // size),  # all ranks' first ones, then second
    "gather": lambda _, output, __, ___: (output, 0),
    "scatter": lambda member, _, __, root: (root, member),
    "reduce_scatter": lambda member, output, size, _: (_REDUCED, output * size + member),  # inputs: likewise
    "all_to_all": lambda member, output, _, __: (output, member),
    MESSAGE: lambda member, output, _, __: (1 - member, output),
}


def compute(members: Sequence[Contribution]) -> None:
    """Carry a collective out.

    Raises:
        ValueError: what a rank is to get is not as large as what it has for it.
    """
    asked, root = members[0].call, members[0].root
    source_of = _SOURCES.get(asked.kind)
    if source_of is None:  # a barrier
        return
    values: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad():
        # All is read before anything is written: an input may be a part of an output.
        for member, contribution in enumerate(members):
            for output in range(len(contribution.outputs)):
                source = source_of(member, output, len(members), root)
                if source not in values:
                    values[source] = _read(members, *source)
        for member, contribution in enumerate(members):
            for number, output in enumerate(contribution.outputs):
                source = source_of(member, number, len(members), root)
                _write(output, values[source], f"{asked.kind}: rank {source[0]} of the group sends", member)


def _read(members: Sequence[Contribution], source: int, number: int) -> Tensor:
    if source == _REDUCED:
        return _REDUCTIONS[members[0].call.op or "SUM"]([member.inputs[number] for member in members])
    return members[source].inputs[number].clone()


def _write(output: Tensor, value: Tensor, sent: str, member: int) -> None:
    if value.shape != output.shape:
        if value.numel() != output.numel():
            raise ValueError(f"{sent} {list(value.shape)} to rank {member}, which expects {list(output.shape)}")
        value = value.reshape(output.shape)
    (output if output.is_sparse else output.detach()).copy_(value)  # autograd must not see the writing


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
