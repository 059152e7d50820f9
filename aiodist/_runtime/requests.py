"""Requests: what a call on a replica's context asks for, checked and described before any other replica is affected.

Equal calls give the same `Request`, with the same `Call` for the ledger and the same executors: a training step repeats
a few requests, and describing one costs more than comparing it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, Spec, describe
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives import kinds
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import Collective, Kind
from aiodist._core.call import LEAF, ON_A_GPU, Call, Function, code_digest
from aiodist._runtime import arguments
from aiodist._runtime.stacks import function_name
from aiodist_kernels import Accumulate, ReduceOp

_MOST_KEPT = 4096
_LEARNS_AT = (3, 30, 300)
"""After how many misses code that recognises a nest is generated: it must come again for that to pay."""

Compute: TypeAlias = Callable[[Sequence[Any], CommunicationOptions], Any]


class OverWorkers(NamedTuple):
    """How a request with its own ``compute`` is carried out over several workers."""

    collective: Collective  # what is computed from the contributions of all replicas
    contribute: Callable[[Sequence[Any]], Sequence[Any]]  # makes the local replicas' contributions from their values
    finish: Callable[[Sequence[Any], Any], Any]  # makes this worker's result from the values and the collective's


class Request:
    """What a call asks for."""

    __slots__ = (
        "_executors", "_misses", "call", "checked_for", "collective", "compute", "dtype", "following", "kind",
        "on_devices", "over_workers", "shape", "spelling", "structure", "template", "usual",
    )  # fmt: skip

    def __init__(
        self,
        collective: Collective,
        call: Call,
        compute: Compute | None = None,
        structure: nests.Structure | None = None,
        over_workers: OverWorkers | None = None,
    ) -> None:
        self.collective: Collective = collective
        self.call: Call = call  # as the ledger compares it
        self.kind: Kind = collective.kind
        self.spelling: Any = collective.op  # the op as the last caller wrote it
        self.compute: Compute | None = compute  # makes the result from the values and options, if no plan does
        self.over_workers: OverWorkers | None = over_workers
        self.structure: nests.Structure | None = structure
        self.shape: tuple[int | None, ...] | None = None
        self.dtype: Any = None
        spec = collective.spec
        plain = compute is None and collective.kind is kinds.ALL_REDUCE and call.name is None
        if plain and spec is not None and spec.single and spec.marks == (None,):  # one NumPy array, without a name
            self.shape, self.dtype = spec.shapes[0], spec.dtypes[0]
        self.on_devices: bool = spec is not None and any(isinstance(mark, DeviceType) for mark in spec.marks)
        self.template: nests.Template | None = None  # recognises such nests, once they have come often enough
        self.following: Request | None = None  # the request that came next the last time
        self.checked_for: int = 0  # the number of replicas for which it was last found valid
        self._misses = 0
        # The number of replicas, and the executor on the host if all take part, without options. They change together,
        # because event loops in other threads have the same request.
        self.usual: tuple[int, Any] = (0, None)
        self._executors: dict[Any, Any] = {}

    @classmethod
    def of_kind(cls, kind: Kind) -> Request:
        """Return the request for a kind that has neither value nor arguments."""
        return cls(Collective(kind, None, None, None), Call(kind.name))

    def learn(self, nest: Any) -> None:
        """Note that the template did not recognise a nest of NumPy arrays; at some misses, generate another one."""
        self._misses += 1
        if self._misses in _LEARNS_AT:
            self.template = nests.template(nest)

    def check(self, size: int) -> None:
        """Check that it is valid for that many replicas."""
        self.collective.check(size)
        self.checked_for = size

    def executor(self, size: int, absent: tuple[int, ...], accumulate: Accumulate, names: tuple[str, ...]) -> Any:
        """Return its executor for the replicas of this process, without the absent ones, on these devices."""
        if absent:  # hardly ever the same again
            self.collective.check_present(absent)
            return executor(self.collective, size, absent, accumulate, names)
        key = size, accumulate, names
        found = self._executors.get(key)
        if found is None:
            found = self._executors[key] = executor(self.collective, size, (), accumulate, names)
            if not names and accumulate == "native":
                self.usual = size, found
        return found


BARRIER = Request.of_kind(kinds.BARRIER)


@functools.lru_cache(_MOST_KEPT)
def array_request(kind: Kind, op: ReduceOp | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Request:
    """Return the request for a single NumPy array without a name, the most common one."""
    return request(kind, op, None, None, None, Spec((shape,), (dtype,), (None,), single=True))


@functools.lru_cache(_MOST_KEPT)
def request(
    kind: Kind, op: ReduceOp | None, detail: Any, name: str | None, structure: Any, spec: Spec | None
) -> Request:
    """Return the request for a described value."""
    call = Call(
        kind.name,
        op=None if op is None else op.name,
        axis=detail if kind.by_leaf else None,
        source=detail if kind.from_one else None,
        name=name,
        structure=None if structure is None else nests.skeleton(structure),
        paths=() if structure is None else tuple(nests.leaf_paths(structure, "")),
        shapes=None if spec is None else spec.shapes,
        dtypes=() if spec is None else tuple([dtype_text(dtype, kind) for dtype in spec.dtypes]),
        arrays=() if spec is None else tuple(map(array_text, spec.marks)),
    )
    return Request(Collective(kind, op, detail, spec), call, structure=structure)


def merge_request(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None) -> Request:
    """Return the request for a merge function with these arguments."""
    _, structure = nests.flatten_with_none((list(args), dict(kwargs)))
    return _merge_request(function_of(fn), name, structure, (len(args), tuple(sorted(kwargs))))


@functools.lru_cache(_MOST_KEPT)
def _merge_request(function: Function, name: str | None, structure: Any, arguments: Any) -> Request:
    text = nests.text(nests.without_factories(structure)).replace("*", LEAF)
    call = Call(kinds.MERGE_CALL.name, function=function, name=name, structure=text, arguments=arguments)
    return Request(Collective(kinds.MERGE_CALL, None, None, None), call)


def dtype_text(dtype: Any, kind: Kind) -> str:
    """Return a leaf's dtype as text for a kind, without byte order; strings of any width can be gathered."""
    if not isinstance(dtype, np.dtype):
        return str(getattr(dtype, "__name__", dtype))
    if kind is kinds.ALL_GATHER and dtype.kind in "US":
        return "str" if dtype.kind == "U" else "bytes"
    return dtype.name if dtype.names is None else str(dtype.newbyteorder("="))  # the name of a record is its size


def array_text(mark: LeafMark) -> str:
    """Return the kind of a leaf as text."""
    if isinstance(mark, DeviceType):
        return mark.name + ON_A_GPU
    return mark.name if isinstance(mark, HostType) else mark or "array"


def reduction(given: ReduceOp | str, value: Any, name: str | None) -> tuple[Request, nests.Build | None, Any]:
    """Return the request for an all_reduce of a value, the function that builds such nests, and the leaves.

    For a single leaf there is no such function, and the leaf comes instead of a list.
    """
    op = arguments.reduce_op(given, value)
    if type(value) is np.ndarray and name is None:
        found = array_request(kinds.ALL_REDUCE, op, value.shape, value.dtype)
        found.spelling = given
        return found, None, value
    structure, spec, leaves = described(value)
    found = request(kinds.ALL_REDUCE, op, None, arguments.checked_name(name), structure, spec)
    if structure is None:
        return found, None, leaves
    if name is None and not any(spec.marks):
        found.spelling = given
        found.learn(value)
    return found, nests.builder(structure), leaves


def described(value: Any) -> tuple[nests.Structure | None, Spec, Any]:
    """Return structure, spec and leaves of a value, as `describe` does; warn if all leaves are None."""
    found = describe(value)
    if not found[1].shapes:
        arguments.check_not_all_none(value, 5)
    return found


def function_of(fn: Callable[..., Any]) -> Function:
    """Return what two merge functions must share to be the same: their code or, for callable objects, their type."""
    while isinstance(fn, functools.partial) or inspect.ismethod(fn):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    name = function_name(fn)
    code = getattr(fn, "__code__", None)
    if code is not None:
        return Function(name, code.co_filename, code.co_firstlineno, _digest(code))
    if inspect.isbuiltin(fn) or isinstance(fn, type):
        return Function(name, "", 0, f"{fn.__module__}.{name}")
    return Function(type(fn).__qualname__, "", 0, f"{type(fn).__module__}.{type(fn).__qualname__}")


_digest = functools.lru_cache(maxsize=1024)(code_digest)
