"""DLPack, the way in which frameworks hand each other memory: giving memory that NumPy cannot own, and reading.

A capsule's deleter is called by whoever took the memory, in any thread, perhaps when the interpreter is gone. That is
no place for a function in Python. So the capsules are NumPy's own, of an array over the address, which nobody reads
through it; then device and dtype are written over. NumPy's deleter lets go of that array, and with it of the owner.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

CPU: Final = 1
CUDA: Final = 2

_BFLOAT: Final = 4  # of DLPack's DLDataTypeCode
_NAMES: Final = (b"dltensor", b"dltensor_versioned")
_VERSIONED_HEAD: Final = 32  # version, manager_ctx, deleter, flags


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
        owner: keeps the memory; it is let go of when nobody has taken it, or the last who has has let go.
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
            raise BufferError("this memory is handed over where it lies, and not copied")
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
