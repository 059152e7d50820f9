"""Arrays in a GPU's memory: an address, a shape and a dtype; and handing such memory over by DLPack.

No framework is imported here, and nothing is copied unless an array has gaps. What frameworks differ in is in
`frameworks`, a class for each.

A DLPack capsule's deleter is called by whoever took the memory, in any thread, perhaps when the interpreter is gone.
That is no place for a function in Python. So the capsules are NumPy's own, of an array over the address, which nobody
reads through it; then device and dtype are written over. NumPy's deleter drops that array, and with it the owner.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

CUDA: Final = 2  # of DLPack's DLDeviceType

_BFLOAT: Final = 4  # of DLPack's DLDataTypeCode
_NAMES: Final = (b"dltensor", b"dltensor_versioned")
_VERSIONED_HEAD: Final = 32  # version, manager_ctx, deleter, flags

DType: TypeAlias = np.dtype[Any]
Allocate: TypeAlias = Callable[[int, int], Any]
"""Returns memory on a GPU for so many bytes: an object that keeps it, and has an ``address``."""

Spec: TypeAlias = tuple[tuple[int, ...], DType]
"""Shape and dtype of an array to be made."""


@dataclass(slots=True, eq=False)
class DeviceArray:
    """What of a device array takes part in a collective, or an array on a device that a result is written into."""

    address: int  # of its first element
    shape: tuple[int, ...]
    dtype: DType  # as NumPy names it
    ordinal: int  # the driver's number for its GPU
    stream: int  # the handle of the stream on which its owner works
    owner: Any  # keeps the memory
    strides: tuple[int, ...] | None = None  # in bytes; None where elements lie without gaps, in C's order

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return math.prod(self.shape) * self.dtype.itemsize


class DeviceType:
    """A framework's arrays in GPU memory, on whichever GPU: there is one for each framework.

    No abstract base class: whether a leaf's type is one is asked too often for what that costs.
    """

    name: str  # what the framework is called
    finishes = False

    def is_on_gpu(self, leaf: Any) -> bool:
        """Return whether an object of the framework's is an array in a GPU's memory."""
        raise NotImplementedError

    def view(self, leaf: Any) -> DeviceArray:
        """Return what of an array takes part in a collective; a TypeError says why it cannot."""
        raise NotImplementedError

    def buffer(self, leaf: Any) -> DeviceArray:
        """Return an array as one to write into; a TypeError says why it cannot be."""
        raise NotImplementedError

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        """Return new arrays, or what `finish` makes them of, each with its address; ``allocate`` may give memory."""
        raise NotImplementedError

    def stream(self, ordinal: int) -> int:
        """Return the handle of the stream on which the framework works on that GPU now."""
        raise NotImplementedError

    def finish(self, made: list[Any]) -> list[Any]:
        """Return the framework's arrays of what `make` returned, when their elements are there."""
        raise NotImplementedError


def strides_in_c_order(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of an array without gaps, in bytes."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def has_gaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether elements lie otherwise than without gaps, in C's order; axes of one element lie anyhow."""
    plain = strides_in_c_order(shape, itemsize)
    if strides == plain or 0 in shape:
        return False
    return any(size > 1 and step != own for size, step, own in zip(shape, strides, plain, strict=True))


def lies_apart(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether each element has memory of its own, and axes lie in forward order."""
    reach = itemsize
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True) if size > 1):
        if step < reach:
            return False
        reach += step * (size - 1)
    return True


def write_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Return strides to write by, None for C's order without gaps; elements must lie apart, in forward order."""
    if not has_gaps(shape, strides, itemsize):
        return None
    if not lies_apart(shape, strides, itemsize):
        raise TypeError(
            f"out must hold arrays whose elements lie apart, in forward order, got strides {strides} in bytes for "
            f"the shape {shape}"
        )
    return strides


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


_is_valid: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Exported:
    """Memory that consumers of DLPack take over, each without a copy. What was to be written into it has been.

    Args:
        address: of the first element.
        shape: its shape; elements lie without gaps, in C's order.
        dtype: as NumPy or ml_dtypes names it, in native byte order.
        device: DLPack's type and number of the device.
        owner: keeps the memory, until nobody has taken it, or the last one who has drops it.
    """

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: tuple[int, int], owner: Any
    ) -> None:
        self._memory = _Memory(address, shape, dtype, owner)
        self._bfloat16 = dtype.name == "bfloat16"
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(
        self,
        *,
        stream: Any = None,  # the memory is ready: no stream has to wait for it
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != self._device):
            raise BufferError("this memory is shared as it is and cannot be copied")
        versioned = {} if max_version is None or max_version[0] < 1 else {"max_version": (1, 0)}
        capsule = np.asarray(self._memory).__dlpack__(**versioned)  # type: ignore[arg-type]
        tensor = _tensor(capsule)
        tensor.device_type, tensor.device_id = self._device
        if self._bfloat16:
            tensor.code = _BFLOAT
        return capsule


class _Memory:
    """What NumPy makes an array of, which keeps it."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any) -> None:
        typestr = "<u2" if dtype.name == "bfloat16" else dtype.str
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": shape, "typestr": typestr}
        self.owner = owner


def _tensor(capsule: Any) -> _Tensor:
    """Return the tensor in a capsule that nobody has taken; it lives as long as the capsule."""
    name = next(name for name in _NAMES if _is_valid(capsule, name))
    begin: int = _pointer(capsule, name)
    return _Tensor.from_address(begin + (_VERSIONED_HEAD if name == _NAMES[1] else 0))


def address_in(capsule: Any) -> tuple[int, tuple[int, ...] | None]:
    """Return where the first element of a capsule's array lies, and its strides in elements; None for C's order."""
    tensor = _tensor(capsule)
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    return (tensor.data or 0) + tensor.byte_offset, strides
