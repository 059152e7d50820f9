# SPDX-License-Identifier: Apache-2.0
"""Compiling with the process's warnings left alone.

At each step of its type inference Numba exchanges the filters of warnings, and where warnings go, and puts back what
was there. All threads share these. So what a program warns of while another thread compiles would miss who catches it;
and where the program exchanges them as well (`warnings.catch_warnings`), each puts back what the other had set, which
leaves filters in force, or warnings unseen, for the rest of the process. Numba gathers its own warnings so, and these
kernels give none: they are compiled without.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any


@contextmanager
def leaving_warnings_alone(core: str = "numba.core") -> Iterator[None]:
    """Let a compiler not exchange filters of warnings; no other thread compiles meanwhile.

    Args:
        core: the package of the compiler's own modules.
    """
    fixer, lock = import_module(f"{core}.errors").WarningsFixer, import_module(f"{core}.compiler_lock")
    with lock.global_compiler_lock:
        before = fixer.catch_warnings
        fixer.catch_warnings = _catch_none
        try:
            yield
        finally:
            fixer.catch_warnings = before


def _catch_none(_fixer: Any, filename: str | None = None, lineno: int | None = None) -> AbstractContextManager[None]:  # noqa: ARG001
    return nullcontext()
