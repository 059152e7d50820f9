# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled beside a program, whose warnings are no business of the compiler's."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from aiodist_kernels import ReduceOp, compiled_tier
from aiodist_kernels.plans import find_plan
from aiodist_kernels.warnings_alone import leaving_warnings_alone


def test_filters_stay_while_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("_compiled", "_small", "_small_code"):
        monkeypatch.setattr(compiled_tier, known, {})
    rule = find_plan(ReduceOp.SUM, np.dtype(np.float32), "native").rule
    callers: list[str] = []

    class Noted(warnings.catch_warnings):
        def __enter__(self) -> Any:
            callers.append(sys._getframe(1).f_globals["__name__"])
            return super().__enter__()

    with monkeypatch.context() as patch:
        patch.setattr(warnings, "catch_warnings", Noted)
        assert compiled_tier.compile_for(rule, 3) is not None
        assert compiled_tier.compile_small_for(rule) is not None
    assert not [name for name in callers if name.startswith("numba.")]  # others' are imported, once in a process


def test_compiler_gathers_its_warnings_again_afterwards() -> None:
    fixer = importlib.import_module("numba.core.errors").WarningsFixer
    gathers = fixer.catch_warnings
    with leaving_warnings_alone():
        assert fixer.catch_warnings is not gathers
    assert fixer.catch_warnings is gathers
