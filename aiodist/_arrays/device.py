"""Arrays in GPU memory: their framework, address and stream, and how the framework makes others.

No framework is imported here, and nothing is copied unless an array has gaps. This code runs for every array of every
collective, so each class uses what its framework has at hand: PyTorch's ``data_ptr``, CuPy's ``data.ptr``, Numba's
``gpu_data``. JAX has no address that is ordered after pending computations: its arrays come by DLPack, for which the
legacy default stream waits, and its results are our own memory, which it takes over.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from aiodist._arrays.host import HostType, bfloat16, class_name, dlpack_device, host_type_of, packages, refuse_gradient
from aiodist_kernels.rules import DType

CUDA: Final = 2  # of DLPack's DLDeviceType
LEGACY_DEFAULT_STREAM: Final = 1
PER_THREAD_DEFAULT_STREAM: Final = 2  # one handle, but another stream in each thread

_BFLOAT: Final = 4  # of DLPack's DLDataTypeCode

Allocate: TypeAlias = Callable[[int, int], Any]
"""Returns memory, for a GPU and a number of bytes: its owner, which has an ``address``."""

ArraySpec: TypeAlias = tuple[tuple[int, ...], DType]  # the shape and dtype of an array to be made


@dataclass(slots=True, eq=False)
class DeviceArray:
    """An array's memory on a device, contiguous in C order: an input of a collective, or a buffer for a result."""

    address: int  # of its first element
    shape: tuple[int, ...]
    dtype: DType  # NumPy's
    ordinal: int  # the driver's number for its GPU
    stream: int  # the handle of the stream on which its owner works
    owner: Any  # keeps the memory

    @property
    def nbytes(self) -> int:
        """The number of bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class DeviceType:
    """A framework's arrays in GPU memory, on any GPU; there is one instance for each framework.

    It is no abstract base class, because `isinstance` checks of leaves would be too slow.
    """

    name: str  # the framework's name
    finishes = False  # whether `finish` must be called

    def is_on_gpu(self, leaf: Any) -> bool:
        """Return whether one of the framework's objects is an array in GPU memory."""
        return hasattr(type(leaf), "__cuda_array_interface__")

    def view(self, leaf: Any) -> DeviceArray:
        """Return an array's memory; a TypeError says why it cannot take part in a collective."""
        raise NotImplementedError

    def buffer(self, leaf: Any) -> DeviceArray:
        """Return an array's memory for writing; a TypeError says why that is impossible."""
        found = self.view(leaf)
        if found.owner is not leaf:  # it is a copy
            raise TypeError(
                "out must hold contiguous arrays on GPUs, with elements in C's order; leave it out, and copy"
            )
        return found

    def make(self, specs: Sequence[ArraySpec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        """Return new arrays, or what `finish` turns into arrays, with their addresses."""
        raise NotImplementedError

    def stream(self, ordinal: int) -> int:
        """Return the handle of the framework's current stream on a GPU."""
        raise NotImplementedError

    def finish(self, made: list[Any]) -> list[Any]:
        """Turn what `make` returned into arrays, once their elements are written."""
        raise NotImplementedError


# Strides.


def strides_in_c_order(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a contiguous array, in bytes."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def has_gaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether an array is not contiguous in C order; the strides of axes of one element do not matter."""
    plain = strides_in_c_order(shape, itemsize)
    if strides == plain or 0 in shape:
        return False
    return any(size > 1 and step != own for size, step, own in zip(shape, strides, plain, strict=True))


# Frameworks.


class Torch(DeviceType):
    """PyTorch."""

    name = "torch"

    def is_on_gpu(self, leaf: Any) -> bool:
        return bool(getattr(leaf, "is_cuda", False))

    def view(self, leaf: Any) -> DeviceArray:
        if leaf.is_conj() or leaf.is_neg():  # its memory does not hold its values
            leaf = leaf.resolve_conj().resolve_neg()
        leaf = leaf.contiguous()
        if leaf.requires_grad:
            refuse_gradient(leaf)
        dtype, ordinal = _of_torch(leaf.dtype), leaf.get_device()
        return DeviceArray(leaf.data_ptr(), tuple(leaf.shape), dtype, ordinal, self.stream(ordinal), leaf)

    def make(self, specs: Sequence[ArraySpec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        torch = sys.modules["torch"]
        device = torch.device("cuda", ordinal)
        made = [torch.empty(shape, dtype=_to_torch(dtype), device=device) for shape, dtype in specs]
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
def _torch_stream() -> Any:
    torch = sys.modules["torch"]
    # Compiled graphs use this, which creates no object.
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001
    return quick or (lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)


def _array(leaf: Any, address: int, ordinal: int, stream: int) -> DeviceArray:
    """Return the memory of an array with a NumPy dtype."""
    if not leaf.dtype.isnative:
        raise TypeError(
            f"expected numbers in this machine's byte order, got {leaf.dtype.str}; copy them into a new array"
        )
    return DeviceArray(address, leaf.shape, leaf.dtype, ordinal, stream, leaf)


class CuPy(DeviceType):
    """CuPy."""

    name = "cupy"

    def view(self, leaf: Any) -> DeviceArray:
        if not leaf.flags.c_contiguous:
            with leaf.device:
                leaf = sys.modules["cupy"].ascontiguousarray(leaf)
        memory = leaf.data
        return _array(leaf, memory.ptr, memory.device_id, self.stream(memory.device_id))

    def make(self, specs: Sequence[ArraySpec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(ordinal):
            made = [cupy.empty(shape, dtype) for shape, dtype in specs]
        return [(array, array.data.ptr) for array in made]

    def stream(self, ordinal: int) -> int:
        handle: int = sys.modules["cupy"].cuda.get_current_stream(ordinal).ptr
        return handle


class Numba(DeviceType):
    """Numba, and the package numba-cuda."""

    name = "numba"

    def view(self, leaf: Any) -> DeviceArray:
        if has_gaps(leaf.shape, leaf.strides, leaf.dtype.itemsize):
            raise TypeError("expected a Numba device array without gaps, in C's order; copy it into a new one first")
        stream = int(leaf.stream or 0) or _numba_default_stream()
        return _array(leaf, _numba_address(leaf), leaf.gpu_data.context.device.id, stream)

    def make(self, specs: Sequence[ArraySpec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        cuda = sys.modules["numba.cuda"]
        with cuda.gpus[ordinal]:
            made = [cuda.device_array(shape, dtype) for shape, dtype in specs]
        return [(array, _numba_address(array)) for array in made]

    def stream(self, ordinal: int) -> int:
        return _numba_default_stream()


@cache
def _numba_default_stream() -> int:
    """Return the default stream, which NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM=1 makes each thread's own."""
    names = ("numba.cuda.core.config", "numba.core.config")
    config = next((sys.modules[name] for name in names if name in sys.modules), None)
    own = getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)
    return PER_THREAD_DEFAULT_STREAM if own else LEGACY_DEFAULT_STREAM


def _numba_address(leaf: Any) -> int:
    return leaf.device_ctypes_pointer.value or 0


class Jax(DeviceType):
    """JAX."""

    name = "jax"
    finishes = True

    def is_on_gpu(self, leaf: Any) -> bool:
        tell = getattr(type(leaf), "platform", None)
        return tell is not None and leaf.platform() == "gpu"

    def view(self, leaf: Any) -> DeviceArray:
        _, ordinal = leaf.__dlpack_device__()  # a BufferError if it lies on several GPUs
        capsule = leaf.__dlpack__(stream=LEGACY_DEFAULT_STREAM)
        address, strides = address_in(capsule)
        if strides is not None and has_gaps(leaf.shape, strides, 1):
            raise TypeError("expected a JAX array in C's order, got one with a layout of its own; copy it first")
        return DeviceArray(address, leaf.shape, np.dtype(leaf.dtype), int(ordinal), LEGACY_DEFAULT_STREAM, capsule)

    def buffer(self, leaf: Any) -> NoReturn:
        raise TypeError("out must be writeable, got a JAX array, which cannot be changed; leave it out")

    def make(self, specs: Sequence[ArraySpec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
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
"""By the package of an array's class; jaxlib is the compiled part of JAX."""


def device_type_of(leaf: Any) -> DeviceType | None:
    """Return the framework of an array in GPU memory, None for others; a TypeError if the framework is unknown."""
    kind: Any = type(leaf)
    for package in packages(kind):
        if package in TYPES:  # only the framework can tell whether it is on a GPU
            return TYPES[package] if TYPES[package].is_on_gpu(leaf) else None
    if hasattr(leaf, "__dlpack_device__"):
        if dlpack_device(leaf) != CUDA:
            return None
    elif not hasattr(leaf, "__cuda_array_interface__"):
        return None
    known = ", ".join(dict.fromkeys(kind.name for kind in TYPES.values()))
    raise TypeError(
        f"expected a GPU array of {known}, got a {class_name(leaf)}; convert it without a copy, "
        "e.g. torch.from_dlpack(value)"
    )


def framework_of(leaf: Any) -> HostType | DeviceType | None:
    """Return the framework of an array in any memory; None if it is not foreign. See `host_type_of`."""
    return device_type_of(leaf) or host_type_of(leaf)


# DLPack, by which JAX exports its memory and takes over ours.


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _tensor(capsule: Any) -> _Tensor:
    """Return the tensor in a capsule that has not been consumed; it lives as long as the capsule."""
    return _Tensor.from_address(_pointer(capsule, b"dltensor"))


def address_in(capsule: Any) -> tuple[int, tuple[int, ...] | None]:
    """Return the address of a capsule's array, and its strides in elements; None for C order."""
    tensor = _tensor(capsule)
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    return (tensor.data or 0) + tensor.byte_offset, strides


class Exported:
    """Memory on a GPU that JAX takes over without a copy, once it is written.

    The consumer of a capsule calls its deleter in any thread, perhaps after the interpreter has ended, so the deleter
    must not be a Python function. Therefore the capsule is NumPy's own, of an array over the address, which is never
    read; then device and dtype are overwritten. NumPy's deleter drops that array, and with it the owner.

    Elements are contiguous in C order and native byte order. ``device`` is DLPack's type and number of the device.
    ``owner`` keeps the memory until the last consumer drops it.
    """

    def __init__(self, address: int, shape: tuple[int, ...], dtype: DType, device: tuple[int, int], owner: Any) -> None:
        self._bfloat16 = dtype.name == "bfloat16"
        self._device, self.owner = device, owner
        typestr = "<u2" if self._bfloat16 else dtype.str
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": shape, "typestr": typestr}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:  # in the oldest form, which every version reads; nothing is pending
        capsule = np.asarray(self).__dlpack__()
        tensor = _tensor(capsule)
        tensor.device_type, tensor.device_id = self._device
        if self._bfloat16:
            tensor.code = _BFLOAT
        return capsule
