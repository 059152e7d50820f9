"""The views of frameworks' arrays; host memory stands in for GPU memory if a framework is installed."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiodist._arrays import device as frameworks
from aiodist._arrays.device import CUDA, CuPy, Exported, Jax, Numba, Torch, address_in, device_type_of
from aiodist._arrays.host import CPU
from tests.kernels.arrays import SINGLE


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(frameworks, "_torch_stream", lambda: lambda ordinal: 40 + ordinal)
    return module


def test_tensors(torch: Any) -> None:
    value = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    seen = Torch().view(value)
    assert (seen.address, seen.shape, seen.dtype) == (value.data_ptr(), (3, 4), SINGLE)
    assert (seen.ordinal, seen.stream) == (-1, 39)
    turned = Torch().view(value.T)
    assert turned.address != value.data_ptr()
    assert turned.owner.tolist() == value.T.tolist()
    assert Torch().view(torch.ones(2, dtype=torch.bfloat16)).dtype.name == "bfloat16"
    with pytest.raises(TypeError, match=r"pass value\.detach"):
        Torch().view(torch.ones(2, requires_grad=True))


def test_conjugated_and_negated_tensors_are_resolved(torch: Any) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    seen = Torch().view(value.conj())
    assert seen.owner.is_conj() is False
    assert torch.view_as_real(seen.owner).tolist() == [[1, -2], [3, 4]]
    assert Torch().view(value.conj().imag).owner.tolist() == [-2, 4]


def test_tensors_as_buffers(torch: Any) -> None:
    value = torch.zeros(4, 6, dtype=torch.float64)
    assert Torch().buffer(value).address == value.data_ptr()
    for wrong in (value[:, ::2], torch.zeros(1).expand(4), torch.tensor([1j]).conj()):
        with pytest.raises(TypeError, match="out must hold contiguous arrays"):
            Torch().buffer(wrong)


def test_jax_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    jax: Any = pytest.importorskip("jax", reason="JAX is not installed")
    monkeypatch.setattr(frameworks, "CUDA", CPU)
    value = jax.numpy.arange(6, dtype=jax.numpy.bfloat16).reshape(2, 3)
    assert device_type_of(value) is None, "it is on the host"
    asked: list[int] = []

    def capsule(stream: int) -> Any:
        asked.append(stream)
        return value.__dlpack__()

    plain = SimpleNamespace(
        shape=value.shape, dtype=value.dtype, __dlpack_device__=value.__dlpack_device__, __dlpack__=capsule
    )
    seen = Jax().view(plain)
    assert asked == [1], "the legacy default stream waits until it is computed"
    assert (seen.address, seen.shape, seen.dtype.name) == (value.unsafe_buffer_pointer(), (2, 3), "bfloat16")
    assert (seen.ordinal, seen.stream) == (0, 1)
    with pytest.raises(TypeError, match="cannot be changed"):
        Jax().buffer(value)


def planted(module: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "<f4", **parts: Any) -> Any:
    """Return an object with the attributes of a framework's arrays."""
    kind = type("Array", (SimpleNamespace,), {"__module__": module, "__cuda_array_interface__": {}})
    return kind(shape=shape, strides=strides, dtype=np.dtype(dtype), **parts)


def of_numba(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "<f4", stream: int = 0) -> Any:
    pointer, device = SimpleNamespace(value=4096), SimpleNamespace(id=2)
    gpu_data = SimpleNamespace(context=SimpleNamespace(device=device))
    module = "numba.cuda.cudadrv.devicearray"
    return planted(module, shape, strides, dtype, stream=stream, device_ctypes_pointer=pointer, gpu_data=gpu_data)


def test_numba_arrays() -> None:
    value = of_numba((2, 3), (12, 4))
    assert isinstance(device_type_of(value), Numba)
    seen = Numba().view(value)
    assert (seen.address, seen.shape, seen.dtype, seen.ordinal, seen.stream) == (4096, (2, 3), SINGLE, 2, 1)
    assert Numba().view(of_numba((1, 3), (400, 4))).shape == (1, 3)
    with pytest.raises(TypeError, match="without gaps"):
        Numba().view(of_numba((2, 3), (4, 8)))
    with pytest.raises(TypeError, match="byte order"):
        Numba().view(of_numba((2,), (4,), ">f4"))
    with pytest.raises(TypeError, match="without gaps"):
        Numba().buffer(of_numba((2, 3), (4, 8)))


@pytest.mark.parametrize(("setting", "stream"), [(0, 1), (1, 2)])
def test_numba_default_stream_follows_its_setting(monkeypatch: pytest.MonkeyPatch, setting: int, stream: int) -> None:
    config = SimpleNamespace(CUDA_PER_THREAD_DEFAULT_STREAM=setting)
    monkeypatch.setitem(sys.modules, "numba.cuda.core.config", config)
    frameworks._numba_default_stream.cache_clear()
    try:
        assert Numba().view(of_numba((2,), (4,))).stream == Numba().stream(0) == stream
        assert Numba().view(of_numba((2,), (4,), stream=77)).stream == 77
    finally:
        frameworks._numba_default_stream.cache_clear()


def of_cupy(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "<f4") -> Any:
    data, flags = SimpleNamespace(ptr=8192, device_id=1), SimpleNamespace(c_contiguous=strides == (12, 4))
    return planted("cupy", shape, strides, dtype, data=data, flags=flags, device=nullcontext())


def test_cupy_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(get_current_stream=lambda ordinal: SimpleNamespace(ptr=70 + ordinal))
    copied = of_cupy((2, 3), (12, 4))
    cupy = SimpleNamespace(cuda=current, ascontiguousarray=lambda _: copied)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    value = of_cupy((2, 3), (12, 4))
    assert isinstance(device_type_of(value), CuPy)
    seen = CuPy().view(value)
    assert (seen.address, seen.shape, seen.ordinal, seen.stream) == (8192, (2, 3), 1, 71)
    with pytest.raises(TypeError, match="out must hold contiguous arrays"):
        CuPy().buffer(of_cupy((2, 3), (24, 8)))
    with pytest.raises(TypeError, match="byte order"):
        CuPy().view(of_cupy((2, 3), (12, 4), ">f4"))


def test_arrays_of_unknown_frameworks_are_refused() -> None:
    class Unknown:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(TypeError, match=r"expected a GPU array of torch, cupy, numba, jax.*torch\.from_dlpack"):
        device_type_of(Unknown())


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(kind) for kind in (np.float32, np.float64, np.int8, np.bool_, np.complex64)]


def exported(array: np.ndarray, freed: list[int]) -> Exported:
    """Return an array's memory; the end of its owner is added to ``freed``."""
    owner = array[...]
    weakref.finalize(owner, freed.append, 1)
    return Exported(array.__array_interface__["data"][0], array.shape, array.dtype, (CPU, 0), owner)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", [*DTYPES, BFLOAT16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)], ids=str)
def test_owner_is_released_once_after_the_consumer(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
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
    while not freed:  # JAX ends its use in a thread, and releases memory at the next collection
        gc.collect()
    assert freed == [1]


def test_memory_on_a_gpu_is_exported_unread() -> None:
    memory = Exported(0x7F00_0000_1000, (2, 3), BFLOAT16, (CUDA, 3), None)
    assert memory.__dlpack_device__() == (CUDA, 3)
    assert address_in(memory.__dlpack__(stream=1))[0] == 0x7F00_0000_1000
