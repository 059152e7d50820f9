"""The frameworks whose arrays are tried: one that is always there, and those that are installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.frameworks import toy

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Framework:
    """A framework, as tests use it.

    Attributes:
        name: what reports call it.
        make: makes an array of its own of a NumPy array, whose memory it does not share.
        type: the class of what it makes.
        mutable: whether its arrays can be changed.
    """

    name: str
    make: Callable[[Any], Any]
    type: type
    mutable: bool = True

    @property
    def module(self) -> Any:
        """Return the module that has ``from_dlpack``."""
        return importlib.import_module({"tests": toy.__name__, "jax": "jax.numpy"}.get(self.name, self.name))


def seen(value: Any) -> np.ndarray[Any, Any]:
    """Return NumPy's view of a framework's array."""
    return np.from_dlpack(value)


def _toy() -> Framework:
    return Framework("tests", lambda array: toy.Tensor(np.array(array)), toy.Tensor)


def _torch() -> Framework:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return Framework("torch", lambda array: torch.from_dlpack(np.array(array)), torch.Tensor)


def _jax() -> Framework:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    return Framework("jax", lambda array: jax.numpy.array(np.array(array)), jax.Array, mutable=False)


FRAMEWORKS = {"toy": _toy, "torch": _torch, "jax": _jax}
