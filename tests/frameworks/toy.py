"""A framework that is always there: mutable arrays with DLPack, which like PyTorch's cannot be made read-only."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

int16 = np.dtype(np.int16)


class Tensor:
    """An array with the methods of a tensor that tests need."""

    requires_grad = False

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key])

    def __array_namespace__(self) -> ModuleType:
        return sys.modules[__name__]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def from_dlpack(other: Any) -> Tensor:
    return Tensor(np.from_dlpack(other))
