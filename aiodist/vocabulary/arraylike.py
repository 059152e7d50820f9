"""What reads as an array: variables, and their components in an update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Array = np.ndarray[Any, Any]


class ArrayLike(NDArrayOperatorsMixin):
    """Stands for the array that it reads as, in arithmetic, in comparisons and in NumPy's functions.

    Comparisons go by element; as a key of a dict it is itself.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    @abstractmethod
    def read_value(self) -> Array:
        """Return the value, a read-only array."""

    def value(self) -> Array:
        """Return the value, a read-only array."""
        return self.read_value()

    def numpy(self) -> Array:
        """Return the value, a read-only array."""
        return self.read_value()

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
