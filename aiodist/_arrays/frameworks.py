"""What frameworks differ in: how an array tells its address, on which stream its owner works, how to make another one.

These run for every array of every collective, so each takes what the framework keeps at hand: PyTorch's ``data_ptr``,
CuPy's ``data.ptr``, Numba's ``gpu_data``. JAX gives no address that is ordered after what it still computes: its arrays
come by DLPack, with the legacy default stream waiting for them, and its results are memory of ours that it takes over.
What each method does, `DeviceType` says.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NoReturn

import numpy as np

from aiodist._arrays.device import (
    CUDA,
    Allocate,
    DeviceArray,
    DeviceType,
    DType,
    Exported,
    Spec,
    address_in,
    has_gaps,
    write_strides,
)
from aiodist._arrays.host import bfloat16, class_name, packages, refuse_gradient

LEGACY_DEFAULT_STREAM: Final = 1
PER_THREAD_DEFAULT_STREAM: Final = 2
"""Each thread's own, by one handle."""


class Torch(DeviceType):
    """PyTorch."""

    name = "torch"

    def is_on_gpu(self, leaf: Any) -> bool:
        return bool(getattr(leaf, "is_cuda", False))

    def view(self, leaf: Any) -> DeviceArray:
        if leaf.is_conj() or leaf.is_neg():  # what its memory holds is not what it says
            leaf = leaf.resolve_conj().resolve_neg()
        return self._array(leaf if leaf.is_contiguous() else leaf.contiguous())

    def buffer(self, leaf: Any) -> DeviceArray:
        if leaf.is_conj() or leaf.is_neg():
            raise TypeError("out must hold plain tensors, got the conjugate or the negative of another one's memory")
        size = leaf.element_size()
        steps = tuple(size * step for step in leaf.stride())
        return self._array(leaf, None if leaf.is_contiguous() else write_strides(tuple(leaf.shape), steps, size))

    def _array(self, leaf: Any, strides: tuple[int, ...] | None = None) -> DeviceArray:
        if leaf.requires_grad:
            refuse_gradient(leaf)
        dtype, ordinal = _of_torch(leaf.dtype), leaf.get_device()
        return DeviceArray(leaf.data_ptr(), tuple(leaf.shape), dtype, ordinal, self.stream(ordinal), leaf, strides)

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        empty, device = sys.modules["torch"].empty, _torch_device(ordinal)
        made = [empty(shape, dtype=_to_torch(dtype), device=device) for shape, dtype in specs]
        return [(tensor, tensor.data_ptr()) for tensor in made]

    def stream(self, ordinal: int) -> int:
        handle: int = _torch_stream()(ordinal)
        return handle


@cache
def _of_torch(dtype: Any) -> DType:
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        return bfloat16()
    try:
        return np.dtype(name)
    except TypeError:
        raise TypeError(f"expected a dtype that NumPy has, too, got {dtype}; convert the values first") from None


@cache
def _to_torch(dtype: DType) -> Any:
    return getattr(sys.modules["torch"], dtype.name)


@cache
def _torch_device(ordinal: int) -> Any:
    return sys.modules["torch"].device("cuda", ordinal)


@cache
def _torch_stream() -> Any:
    torch = sys.modules["torch"]
    # What compiled graphs use: no object is made.
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001
    return quick or (lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)


class _WithInterface(DeviceType):
    """A framework whose arrays have ``__cuda_array_interface__``, shape, strides and dtype."""

    def is_on_gpu(self, leaf: Any) -> bool:
        return hasattr(type(leaf), "__cuda_array_interface__")

    def buffer(self, leaf: Any) -> DeviceArray:
        return self._array(leaf, write_strides(leaf.shape, leaf.strides, leaf.dtype.itemsize))

    def _array(self, leaf: Any, strides: tuple[int, ...] | None = None) -> DeviceArray:
        if not leaf.dtype.isnative:
            raise TypeError(
                f"expected numbers in this machine's byte order, got {leaf.dtype.str}; copy them into a new array"
            )
        address, ordinal, stream = self._place(leaf)
        return DeviceArray(address, leaf.shape, leaf.dtype, ordinal, stream, leaf, strides)

    def _place(self, leaf: Any) -> tuple[int, int, int]:
        """Return an array's address, the number of its GPU, and its stream."""
        raise NotImplementedError


class CuPy(_WithInterface):
    """CuPy."""

    name = "cupy"

    def view(self, leaf: Any) -> DeviceArray:
        if not leaf.flags.c_contiguous:
            with leaf.device:
                leaf = sys.modules["cupy"].ascontiguousarray(leaf)
        return self._array(leaf)

    def _place(self, leaf: Any) -> tuple[int, int, int]:
        memory = leaf.data
        return memory.ptr, memory.device_id, self.stream(memory.device_id)

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(ordinal):
            made = [cupy.empty(shape, dtype) for shape, dtype in specs]
        return [(array, array.data.ptr) for array in made]

    def stream(self, ordinal: int) -> int:
        handle: int = sys.modules["cupy"].cuda.get_current_stream(ordinal).ptr
        return handle


class Numba(_WithInterface):
    """Numba, and the package numba-cuda."""

    name = "numba"

    def view(self, leaf: Any) -> DeviceArray:
        if has_gaps(leaf.shape, leaf.strides, leaf.dtype.itemsize):
            raise TypeError("expected a Numba device array without gaps, in C's order; copy it into a new one first")
        return self._array(leaf)

    def buffer(self, leaf: Any) -> DeviceArray:
        if leaf.__cuda_array_interface__["data"][1]:
            raise TypeError("out must be writeable, got a read-only array")
        return super().buffer(leaf)

    def _place(self, leaf: Any) -> tuple[int, int, int]:
        stream = int(leaf.stream or 0) or _numba_default_stream()
        return _numba_address(leaf), leaf.gpu_data.context.device.id, stream

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        cuda = sys.modules["numba.cuda"]
        with cuda.gpus[ordinal]:
            made = [cuda.device_array(shape, dtype) for shape, dtype in specs]
        return [(array, _numba_address(array)) for array in made]

    def stream(self, ordinal: int) -> int:
        return _numba_default_stream()


@cache
def _numba_default_stream() -> int:
    """Return the default stream, which is each thread's own after NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM=1."""
    configs = [sys.modules[name] for name in ("numba.cuda.core.config", "numba.core.config") if name in sys.modules]
    own = any(getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0) for config in configs[:1])
    return PER_THREAD_DEFAULT_STREAM if own else LEGACY_DEFAULT_STREAM


def _numba_address(leaf: Any) -> int:
    return leaf.device_ctypes_pointer.value or 0


class Jax(DeviceType):
    """JAX, also under the name of the package that has its compiled part."""

    name = "jax"
    finishes = True

    def is_on_gpu(self, leaf: Any) -> bool:
        tell = getattr(type(leaf), "platform", None)
        return tell is not None and leaf.platform() == "gpu"

    def view(self, leaf: Any) -> DeviceArray:
        try:
            kind, ordinal = leaf.__dlpack_device__()
        except BufferError as error:
            raise TypeError(f"expected a JAX array on a single GPU: {error}") from error
        if kind != CUDA:
            raise TypeError(f"expected an array in a GPU's memory, got a JAX array on DLPack's device type {kind}")
        capsule = leaf.__dlpack__(stream=LEGACY_DEFAULT_STREAM)
        address, strides = address_in(capsule)
        if strides is not None and has_gaps(leaf.shape, strides, 1):
            raise TypeError("expected a JAX array in C's order, got one with a layout of its own; copy it first")
        return DeviceArray(address, leaf.shape, np.dtype(leaf.dtype), int(ordinal), LEGACY_DEFAULT_STREAM, capsule)

    def buffer(self, leaf: Any) -> NoReturn:
        raise TypeError("out must be writeable, got a JAX array, which cannot be changed; leave it out")

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        made = []
        for shape, dtype in specs:
            memory = allocate(ordinal, max(1, math.prod(shape) * dtype.itemsize))
            exported = Exported(memory.address, shape, dtype, (CUDA, ordinal), memory)
            made.append((exported, memory.address))
        return made

    def stream(self, ordinal: int) -> int:
        return LEGACY_DEFAULT_STREAM

    def finish(self, made: list[Any]) -> list[Any]:
        return list(map(sys.modules["jax"].dlpack.from_dlpack, made))


_JAX = Jax()
TYPES: dict[str, DeviceType] = {"torch": Torch(), "cupy": CuPy(), "numba": Numba(), "jaxlib": _JAX, "jax": _JAX}
"""By the package that an array's class comes from."""


def framework_of(kind: type) -> DeviceType | None:
    """Return the framework that a class is of; whether an object of it is on a GPU, only that can tell."""
    for package in packages(kind):
        if package in TYPES:
            return TYPES[package]
    return None


def device_type_of(leaf: Any) -> DeviceType | None:
    """Return whose array it is; None if it is none in GPU memory. One of an unknown framework is a TypeError."""
    found = framework_of(type(leaf))
    if found is not None:
        return found if found.is_on_gpu(leaf) else None
    if not _is_on_gpu(leaf):
        return None
    known = ", ".join(dict.fromkeys(kind.name for kind in TYPES.values()))
    raise TypeError(
        f"expected a GPU array of {known}, got a {class_name(leaf)}; convert it without a copy, "
        "e.g. torch.from_dlpack(value)"
    )


def views_on_gpu(leaves: Sequence[Any]) -> tuple[DeviceType, list[DeviceArray]] | None:
    """Return what of leaves takes part, and whose they are, if all are arrays on GPUs of one framework that can."""
    frameworks = {framework_of(kind) for kind in set(map(type, leaves))}
    mark = frameworks.pop()
    if mark is None or frameworks or not all(map(mark.is_on_gpu, leaves)):
        return None
    try:
        return mark, list(map(mark.view, leaves))
    except TypeError:  # for which who looks at them one by one finds the words
        return None


def _is_on_gpu(leaf: Any) -> bool:
    try:
        tell = leaf.__dlpack_device__
    except AttributeError:
        return hasattr(leaf, "__cuda_array_interface__")
    try:
        return int(tell()[0]) == CUDA
    except ValueError:  # PyTorch's "meta" tensors, which have no memory
        return False
