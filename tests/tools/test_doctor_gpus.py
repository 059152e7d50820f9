"""What `aiodist doctor` says of GPUs, on machines with and without."""

from __future__ import annotations

import sys

import pytest

from aiodist.gpu import nccl
from aiodist.tools.doctor import gpus as section
from aiodist.tools.doctor.findings import as_text, missing
from aiodist.vocabulary import gpus

NONE = gpus.Found(missing="no NVIDIA driver is installed (its library, libcuda, was not found)")
ONE = gpus.Found((gpus.Gpu(0, "H200", (9, 0)),), "13.0")


def told(monkeypatch: pytest.MonkeyPatch, found: gpus.Found, versions: dict[str, str]) -> str:
    monkeypatch.setattr(gpus, "find", lambda: found)
    monkeypatch.setattr(section, "_version", versions.get)
    seen = section.gpus()
    assert not missing([seen]), "GPUs are never needed"
    return as_text([seen])


def test_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(monkeypatch, NONE, {})
    assert "devices     none: no NVIDIA driver is installed" in text
    told_twice = "not installed: pip install 'aiodist[cuda]' to reduce arrays on GPUs, where there are any"
    assert text.count(told_twice) == 2


def test_gpus_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(monkeypatch, ONE, {})
    assert "GPU:0       H200, compute capability 9.0" in text
    assert text.count("not installed: pip install 'aiodist[cuda]' to reduce arrays on GPUs") == 2


def test_compiler_that_lacks_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiodist_kernels.cuda.compiled", None)
    text = told(monkeypatch, ONE, dict.fromkeys(section.PACKAGES, "1"))
    assert "kernels     do not compile: " in text
    assert "pip install 'aiodist[cuda]'" in text


def test_nccl_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> None:
        raise ImportError("NCCL's library, libnccl.so.2, was not found: pip install 'aiodist[nccl]'")

    monkeypatch.setattr(nccl, "library", library)
    text = told(monkeypatch, ONE, dict.fromkeys(section.PACKAGES, "1"))
    assert "NCCL's library, libnccl.so.2, was not found" in text
    assert "pip install 'aiodist[nccl]'; without it, arrays on GPUs of several workers go through the host" in text
    assert "aiodist[nccl]" not in told(monkeypatch, NONE, {})
