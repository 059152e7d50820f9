"""Arrays in host memory: NumPy's, objects that read as one, and other frameworks' arrays by way of DLPack.

No framework is imported here. A foreign array, such as PyTorch's or JAX's, tells its device by `__dlpack_device__` and
its framework by its class. NumPy views its memory without a copy, and the framework views a result's memory by its own
`from_dlpack`.

NumPy can share one result with all replicas, because it can be made read-only. A PyTorch tensor cannot: each replica
gets memory of its own, so all but one get copies. JAX arrays cannot be changed, and are shared.
"""

from __future__ import annotations

import importlib
import sys
from abc import abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Final, NoReturn, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from aiodist_kernels import pool

Array = np.ndarray[Any, Any]

CPU: Final = 1  # of DLPack's DLDeviceType
_IMMUTABLE = frozenset({"jax"})


class ArrayLike(NDArrayOperatorsMixin):
    """Acts as the array that it reads as, in arithmetic, comparisons and NumPy's functions: the base of variables.

    Comparisons are element by element; hashing is by identity.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    @abstractmethod
    def read_value(self) -> Array:
        """Return the value, a read-only array."""

    def value(self) -> Array:
        """Return the value, a read-only array."""
        return self.read_value()

    numpy = value

    def __await__(self) -> Generator[Any, Any, Self]:
        """Return this at once, so that an assignment that does not wait can be awaited, too."""
        yield from ()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.read_value(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is not None and any(isinstance(buffer, ArrayLike) for buffer in out):
            self._refuse_in_place()
        arrays = [value.read_value() if isinstance(value, ArrayLike) else value for value in inputs]
        if out is not None:
            kwargs["out"] = out
        return getattr(ufunc, method)(*arrays, **kwargs)

    def _refuse_in_place(self) -> NoReturn:
        raise TypeError(
            "a variable is not changed in place; write `await variable.assign_add(value)` in a replica, "
            "`variable.assign_add(value)` elsewhere, or assign or assign_sub"
        )

    def __setitem__(self, key: object, value: object) -> NoReturn:
        self._refuse_in_place()

    def __getitem__(self, key: Any) -> Any:
        return self.read_value()[key]

    def __len__(self) -> int:
        return len(self.read_value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    def __bool__(self) -> bool:
        return bool(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())

    def __float__(self) -> float:
        return float(self.read_value())

    def __complex__(self) -> complex:
        return complex(self.read_value())

    def __index__(self) -> int:
        return self.read_value().__index__()


@dataclass(frozen=True, slots=True)
class HostType:
    """A framework whose arrays are in host memory."""

    framework: ModuleType  # the module that has the framework's ``from_dlpack``

    @property
    def name(self) -> str:
        """The framework's name."""
        return self.framework.__name__.partition(".")[0]

    def view(self, leaf: Any) -> Array:
        """Return a NumPy array over the memory of a foreign one; a TypeError says why that is impossible."""
        if getattr(leaf, "requires_grad", False):
            refuse_gradient(leaf)
        half = getattr(self.framework, "bfloat16", None)
        if half is not None and leaf.dtype == half:
            return np.from_dlpack(leaf.view(self.framework.int16)).view(bfloat16())
        try:
            return np.from_dlpack(leaf)
        except (BufferError, RuntimeError, ValueError) as error:
            raise TypeError(f"NumPy cannot look at this {class_name(leaf)}: {error}") from error

    def give(self, array: Array) -> Any:
        """Return the framework's array over the memory of a NumPy one, and hand that memory over."""
        own = _writeable(array)
        if own.dtype.name == "bfloat16":
            return self.framework.from_dlpack(own.view(np.int16)).view(self.framework.bfloat16)
        return self.framework.from_dlpack(own)

    def give_each(self, array: Array, count: int) -> list[Any]:
        """Return the framework's arrays with the values of a NumPy one, for `count` replicas; see `give`."""
        if self.name in _IMMUTABLE:
            return [self.give(array)] * count
        return [self.give(array.copy(order="K") if left else array) for left in reversed(range(count))]


def host_type_of(leaf: Any) -> HostType | None:
    """Return an array's framework; None if it is not foreign, or its framework cannot take over results."""
    if not is_foreign(leaf):
        return None
    kind: Any = type(leaf)
    namespace = getattr(leaf, "__array_namespace__", None)
    framework = _package_of(kind) or (None if namespace is None else namespace())
    if framework is None:
        return None
    if dlpack_device(leaf) != CPU:
        raise TypeError(f"expected an array in host memory, got a {class_name(leaf)} elsewhere; copy it first")
    return HostType(framework)


def as_numpy(value: Any) -> Array:
    """Return an array, number or sequence as a NumPy array, over the memory of another framework's array."""
    framework = host_type_of(value)
    return np.asarray(value if framework is None else framework.view(value))


def dlpack_device(leaf: Any) -> int | None:
    """Return DLPack's type of an array's device."""
    try:
        return int(leaf.__dlpack_device__()[0])
    except ValueError:  # from PyTorch's "meta" tensors, which have no memory
        return None


def is_foreign(value: Any) -> bool:
    """Return whether a value is another framework's array; Numba's have no DLPack."""
    has_memory = hasattr(value, "__dlpack_device__") or hasattr(value, "__cuda_array_interface__")
    return has_memory and not isinstance(value, (np.ndarray, np.generic))


@cache
def _package_of(kind: Any) -> ModuleType | None:
    """Return the package with ``from_dlpack`` of a class's most basic base."""
    found = (sys.modules.get(name) for name in reversed(packages(kind)))
    return next((package for package in found if hasattr(package, "from_dlpack")), None)


@cache
def packages(kind: Any) -> tuple[str, ...]:
    """Return the packages of a class and its bases, its own first."""
    return tuple(dict.fromkeys(base.__module__.partition(".")[0] for base in kind.__mro__))


def class_name(leaf: Any) -> str:
    """Return an object's class and package, as in ``torch.Tensor``."""
    kind = type(leaf)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def refuse_gradient(leaf: Any) -> NoReturn:
    """Raise the error for a tensor that takes part in differentiation."""
    raise TypeError(
        f"expected an array of numbers, got a {class_name(leaf)} that requires grad, which a collective would cut "
        "from its graph; pass value.detach(), or the gradient itself: parameter.grad"
    )


def bfloat16() -> np.dtype[Any]:
    """Return NumPy's dtype for bfloat16, if ml_dtypes is installed."""
    try:
        found: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise ImportError("bfloat16 arrays need the package ml_dtypes: pip install ml_dtypes") from None
    return found


def _writeable(array: Array) -> Array:
    """Return the same memory, writeable; or a copy if it has gaps."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        return array.copy()
    try:
        for part in (array.base, array):
            if isinstance(part, np.ndarray) and not part.flags.writeable:
                part.flags.writeable = True
    except ValueError:  # it was received from another worker, in read-only memory
        return array.copy(order="K")
    return array


# Arrays of NumPy.


def copied(leaf: Any) -> Any:
    """Return a copy of an array, in native byte order; anything else unchanged."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    native = leaf.dtype.newbyteorder("=")
    if leaf.nbytes < pool.POOLED_FROM:
        return np.array(leaf, dtype=native, order="K", subok=False)
    copy = pool.empty_like(leaf, native)
    np.copyto(copy, leaf)
    return copy


def frozen(array: Array) -> Array:
    """Return an array as a view that cannot be made writeable again; nothing else may refer to its memory."""
    base = array.base
    array.setflags(False)  # type: ignore[call-arg]  # by position: the keyword alone takes as long as the call
    if isinstance(base, np.ndarray):
        base.setflags(False)  # type: ignore[call-arg]
        return array
    return array[...]


def check_unmasked(array: object, where: str) -> None:
    """Check that an array is not masked: its masked elements would count."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"expected arrays without a mask, got a MaskedArray {where}, whose masked elements would count; fill them "
            "first, e.g. x.filled(0)"
        )


def in_native_order(value: Any) -> Any:
    """Return a replica's contribution, a leaf or a list of leaves, with its arrays in native byte order."""
    if isinstance(value, list):
        return [in_native_order(leaf) for leaf in value]
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value
