"""Foreign arrays: those of other frameworks, such as PyTorch and JAX, seen through DLPack.

No framework is imported here: an array tells by `__dlpack_device__` where it lies, and whose it is by its class. On the
host NumPy looks at its memory without a copy, and the framework at a result's, by its own `from_dlpack`.

NumPy can share one result with all replicas, because it can be made read-only. Nothing makes a PyTorch tensor so:
each replica gets memory of its own, all but one of them copies. JAX arrays cannot be changed, and are shared.

A kind of device is a class with the methods of `HostType`, found by DLPack's number for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

import numpy as np

Array = np.ndarray[Any, Any]

_IMMUTABLE = frozenset({"jax"})


@dataclass(frozen=True, slots=True)
class HostType:
    """A framework's arrays in host memory. Equal for all of them: it is what replicas' leaves have in common.

    Attributes:
        framework: the module that has the framework's ``from_dlpack``.
    """

    framework: ModuleType

    @property
    def name(self) -> str:
        """What the framework is called."""
        return self.framework.__name__.partition(".")[0]

    def view(self, leaf: Any) -> Array:
        """Return a NumPy array over the memory of a foreign one.

        Raises:
            ImportError: it holds bfloat16, and ml_dtypes is not installed.
            TypeError: it takes part in differentiation, or NumPy cannot look at it.
        """
        if getattr(leaf, "requires_grad", False):
            raise TypeError(
                f"expected an array of numbers, got a {_class(leaf)} that requires grad, which a collective would cut "
                "from its graph; pass value.detach(), or the gradient itself: parameter.grad"
            )
        if self._is_bfloat16(leaf):
            return np.from_dlpack(leaf.view(self.framework.int16)).view(_bfloat16())
        try:
            return np.from_dlpack(leaf)
        except (BufferError, RuntimeError, ValueError) as error:
            raise TypeError(f"NumPy cannot look at this {_class(leaf)}: {error}") from error

    def _is_bfloat16(self, leaf: Any) -> bool:
        named = getattr(self.framework, "bfloat16", None)
        return named is not None and leaf.dtype == named

    def give(self, array: Array) -> Any:
        """Return the framework's array over the memory of a NumPy one, which belongs to nobody else from now on."""
        own = _writeable(array)
        if own.dtype.name == "bfloat16":
            return self.framework.from_dlpack(own.view(np.int16)).view(self.framework.bfloat16)
        return self.framework.from_dlpack(own)

    def give_each(self, array: Array, count: int) -> list[Any]:
        """Return the framework's arrays with the values of a NumPy one, for so many replicas; see `give`."""
        if self.name in _IMMUTABLE:
            return [self.give(array)] * count
        return [self.give(array.copy(order="K") if left else array) for left in reversed(range(count))]


ForeignType: TypeAlias = HostType

_TYPES: dict[int, type[ForeignType]] = {1: HostType}  # by DLPack's DLDeviceType


def type_of(leaf: Any) -> ForeignType | None:
    """Return whose array it is; None if it is no foreign array, or one whose framework cannot take a result over.

    Raises:
        TypeError: it is one on a device that is not known here.
    """
    framework = _framework_of(leaf) if is_foreign(leaf) else None
    if framework is None:
        return None
    try:
        device = int(leaf.__dlpack_device__()[0])
    except ValueError as error:  # PyTorch's "meta" tensors, which have no memory
        raise TypeError(f"expected an array in memory, got a {_class(leaf)}: {error}") from error
    if device not in _TYPES:
        raise TypeError(
            f"expected an array in host memory, got a {_class(leaf)} on device type {device} of DLPack; copy it to "
            "the host first"
        )
    return _TYPES[device](framework)


def is_foreign(value: Any) -> bool:
    """Return whether a value is another framework's array."""
    return hasattr(value, "__dlpack_device__") and not isinstance(value, (np.ndarray, np.generic))


def _framework_of(leaf: Any) -> ModuleType | None:
    kind: Any = type(leaf)
    namespace = getattr(leaf, "__array_namespace__", None)  # the standard's way, which PyTorch does not have
    return _package_of(kind) or (None if namespace is None else namespace())


@cache
def _package_of(kind: type) -> ModuleType | None:
    """Return the package of a class, or of one that it comes from, that can take arrays over; the most basic one."""
    packages = (sys.modules.get(base.__module__.partition(".")[0]) for base in reversed(kind.__mro__))
    return next((package for package in packages if hasattr(package, "from_dlpack")), None)


def _writeable(array: Array) -> Array:
    """Return the same memory to write to, or a copy of it where it has gaps."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        return array.copy()
    for part in (array.base, array):
        if isinstance(part, np.ndarray) and not part.flags.writeable:
            part.flags.writeable = True
    return array


def _bfloat16() -> np.dtype[Any]:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        _refuse_bfloat16()
    found: np.dtype[Any] = np.dtype(bfloat16)
    return found


def _refuse_bfloat16() -> NoReturn:
    raise ImportError("bfloat16 arrays need the package ml_dtypes: pip install ml_dtypes") from None


def _class(leaf: Any) -> str:
    kind = type(leaf)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
