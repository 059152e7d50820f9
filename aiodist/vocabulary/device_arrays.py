"""Device arrays: those of PyTorch, CuPy and Numba in a GPU's memory, seen as an address, a shape and a dtype.

No framework is imported here, and nothing is copied unless an array has gaps. What differs between frameworks is short:
how an array tells its address, on which stream its owner works now, and how to make another one.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

DType: TypeAlias = np.dtype[Any]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArray:
    """What of a device array takes part in a collective.

    Attributes:
        address: of its first element; elements lie without gaps, in C's order.
        shape: its shape.
        dtype: as NumPy names it.
        ordinal: the driver's number for its GPU.
        stream: the handle of the stream on which its owner works.
        owner: keeps the memory.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    ordinal: int
    stream: int
    owner: Any

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes they have."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A framework's arrays in GPU memory, on whichever GPU. Equal for all of them.

    Attributes:
        name: what the framework is called.
        see: returns an array as a `DeviceArray`.
        empty: makes an array of the framework's from shape, dtype and the GPU's ordinal.
    """

    name: str
    see: Callable[[Any], DeviceArray]
    empty: Callable[[tuple[int, ...], DType, int], Any]

    def view(self, leaf: Any) -> DeviceArray:
        """Return what of an array takes part in a collective.

        Raises:
            TypeError: it takes part in differentiation, or has a dtype that NumPy has no name for.
        """
        if getattr(leaf, "requires_grad", False):
            raise TypeError(
                "expected an array of numbers, got a tensor that requires grad, which a collective would cut from its "
                "graph; pass value.detach(), or the gradient itself: parameter.grad"
            )
        return self.see(leaf)


def _see_torch(leaf: Any) -> DeviceArray:
    torch = importlib.import_module("torch")
    whole = leaf.contiguous()
    ordinal: int = leaf.device.index
    stream: int = torch.cuda.current_stream(ordinal).cuda_stream
    return DeviceArray(whole.data_ptr(), tuple(leaf.shape), _dtype(str(leaf.dtype)), ordinal, stream, whole)


def _empty_torch(shape: tuple[int, ...], dtype: DType, ordinal: int) -> Any:
    torch = importlib.import_module("torch")
    return torch.empty(shape, dtype=getattr(torch, dtype.name), device=f"cuda:{ordinal}")


def _see_cupy(leaf: Any) -> DeviceArray:
    cupy = importlib.import_module("cupy")
    ordinal: int = leaf.device.id
    with leaf.device:
        whole = cupy.ascontiguousarray(leaf)
        stream: int = cupy.cuda.get_current_stream().ptr
    return DeviceArray(whole.data.ptr, leaf.shape, leaf.dtype, ordinal, stream, whole)


def _empty_cupy(shape: tuple[int, ...], dtype: DType, ordinal: int) -> Any:
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(ordinal):
        return cupy.empty(shape, dtype)


def _see_numba(leaf: Any) -> DeviceArray:
    interface = leaf.__cuda_array_interface__
    if interface.get("strides") is not None:
        raise TypeError("expected a Numba device array without gaps, in C's order; copy it into a new one first")
    stream: int = interface.get("stream") or 0
    address, dtype = interface["data"][0], np.dtype(interface["typestr"])
    return DeviceArray(address, tuple(interface["shape"]), dtype, leaf.gpu_data.context.device.id, stream, leaf)


def _empty_numba(shape: tuple[int, ...], dtype: DType, ordinal: int) -> Any:
    cuda = importlib.import_module("numba.cuda")
    with cuda.gpus[ordinal]:
        return cuda.device_array(shape, dtype)


def _dtype(torch_name: str) -> DType:
    name = torch_name.removeprefix("torch.")
    if name == "bfloat16":
        try:
            found: DType = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        except ImportError:
            raise ImportError("bfloat16 arrays need the package ml_dtypes: pip install ml_dtypes") from None
        return found
    try:
        return np.dtype(name)
    except TypeError:
        raise TypeError(f"expected numbers that NumPy has a name for, got {torch_name}; convert them first") from None


TYPES: dict[str, DeviceType] = {
    "torch": DeviceType("torch", _see_torch, _empty_torch),
    "cupy": DeviceType("cupy", _see_cupy, _empty_cupy),
    "numba": DeviceType("numba", _see_numba, _empty_numba),
}
"""By the package that an array's class comes from."""


_CUDA = 2  # DLPack's DLDeviceType


def type_of(leaf: Any) -> DeviceType | None:
    """Return whose array it is; None if it is none in GPU memory.

    Raises:
        TypeError: aiodist does not know how to make arrays of its kind.
    """
    if not _is_on_gpu(leaf):
        return None
    packages = [base.__module__.partition(".")[0] for base in type(leaf).__mro__]
    found = next((TYPES[package] for package in packages if package in TYPES), None)
    if found is None:
        raise TypeError(
            f"expected a GPU array of {', '.join(TYPES)}, got a {packages[0]}.{type(leaf).__qualname__}; convert it "
            "without a copy, e.g. torch.from_dlpack(value)"
        )
    return found


def _is_on_gpu(leaf: Any) -> bool:
    try:
        tell = leaf.__dlpack_device__
    except AttributeError:
        return hasattr(leaf, "__cuda_array_interface__")
    try:
        return int(tell()[0]) == _CUDA
    except ValueError:  # PyTorch's "meta" tensors, which have no memory
        return False
