"""What can be known of the driver without a GPU: kernels become machine code, and errors name what is missing."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from aiodist._gpu.cuda_core import CudaCore, machine_code
from aiodist_kernels import ReduceOp
from aiodist_kernels.cuda.compiled import compile_form
from aiodist_kernels.cuda.forms import form_for
from aiodist_kernels.rules import rule_for

ELF = b"\x7fELF"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernel_becomes_machine_code(capability: tuple[int, int]) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    program = compile_form(form_for(rule_for(ReduceOp.SUM, np.dtype(np.float32)), 2), capability)
    code = machine_code(core, program.ptx, capability).code
    assert code.startswith(ELF)
    assert program.name.encode() in code


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModuleNotFoundError("No module named 'cuda'"), "need packages that are not installed"),
        (ImportError("cydriver does not export a function"), "cuda-core and cuda-bindings are of versions that do not"),
        (None, r"\(cuda-core is 0.7.0, and must be 1.0 or newer\)"),
    ],
)
def test_packages_that_do_not_serve_are_named(
    monkeypatch: pytest.MonkeyPatch, error: ImportError | None, text: str
) -> None:
    def module(name: str) -> SimpleNamespace:
        if error is not None:
            raise error
        return SimpleNamespace(__version__="0.7.0")

    monkeypatch.setattr(importlib, "import_module", module)
    with pytest.raises(ImportError, match=text) as caught:
        CudaCore()
    assert "'aiodist[cuda]'" in str(caught.value)
