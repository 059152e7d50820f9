"""Memory that others take over by DLPack: as it is, once, and released when the last one has released it."""

from __future__ import annotations

import gc
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

from aiodist._arrays.device import CUDA, Exported, address_in
from aiodist._arrays.host import CPU

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(kind) for kind in (np.float32, np.float64, np.int8, np.bool_, np.complex64)]


def exported(array: np.ndarray, freed: list[int]) -> Exported:
    """Return an array's memory; its owner's end is noted."""
    owner = array[...]
    weakref.finalize(owner, freed.append, 1)
    return Exported(array.__array_interface__["data"][0], array.shape, array.dtype, (CPU, 0), owner)


def settled(freed: list[int]) -> list[int]:
    """Return it when there is something in it; JAX lets go in a thread of its own."""
    deadline = time.monotonic() + 60
    while not freed and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0)
    return freed


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", [*DTYPES, BFLOAT16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)], ids=str)
def test_owner_is_released_once_behind_the_consumer(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    module = pytest.importorskip("jax.dlpack" if name == "jax" else name, reason=f"{name} is not installed")
    if name == "numpy" and dtype == BFLOAT16:
        pytest.skip("NumPy has no bfloat16")
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    freed: list[int] = []
    memory = exported(values, freed)
    taken = module.from_dlpack(memory)
    del memory
    gc.collect()
    if name != "jax":  # it copies what is not aligned to 64 bytes
        assert not freed
    seen = np.asarray(taken.float() if name == "torch" and dtype == BFLOAT16 else taken)
    assert seen.shape == shape
    np.testing.assert_array_equal(seen.astype(np.complex128), values.astype(np.complex128))
    del taken, seen
    assert settled(freed) == [1]


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 3)])
def test_capsule_that_nobody_takes_lets_go_too(version: tuple[int, int] | None) -> None:
    freed: list[int] = []
    memory = exported(np.ones(3), freed)
    capsule = memory.__dlpack__(max_version=version)
    assert ("versioned" in repr(capsule)) is (version is not None and version[0] >= 1)
    del memory
    assert not freed
    del capsule
    assert freed == [1]


def test_memory_on_a_gpu_says_so_and_is_not_looked_at() -> None:
    memory = Exported(0x7F00_0000_1000, (2, 3), BFLOAT16, (CUDA, 3), None)
    assert memory.__dlpack_device__() == (CUDA, 3)
    assert address_in(memory.__dlpack__(stream=1))[0] == 0x7F00_0000_1000
    with pytest.raises(BufferError, match="cannot be copied"):
        memory.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="cannot be copied"):
        memory.__dlpack__(dl_device=(CPU, 0))


def test_address_and_strides_of_a_foreign_capsule() -> None:
    values = np.zeros((4, 6))[1:, ::2]
    assert address_in(values.__dlpack__()) == (values.__array_interface__["data"][0], (6, 2))
