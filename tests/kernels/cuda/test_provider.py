# SPDX-License-Identifier: Apache-2.0
"""What is said where CUDA's libraries are missing."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from aiodist_kernels.cuda import provider


def test_library_that_is_missing_at_the_import_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise RuntimeError('Failure finding "libcudart.so.13"\n  listdir("/somewhere")')

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ImportError) as caught:
        provider._numba_cuda()
    assert str(caught.value).startswith("compiling for CUDA needs its runtime, libNVVM and NVRTC")
    assert str(caught.value).endswith('CUDA toolkit (Failure finding "libcudart.so.13")')
    assert provider.INSTALL in str(caught.value)


def test_library_that_is_missing_at_a_compilation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("libNVVM cannot be found")

    monkeypatch.setattr(provider, "cuda", type("Cuda", (), {"compile_ptx": staticmethod(refuse)}))
    with pytest.raises(ImportError, match=r"CUDA_HOME to the folder of a CUDA toolkit \(libNVVM cannot be found\)"):
        provider.compile_ptx(lambda: None, (), (9, 0))
