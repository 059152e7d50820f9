# SPDX-License-Identifier: Apache-2.0
"""The one file that chooses who compiles for CUDA.

`numba.cuda` is either the target that Numba itself still carries, or, where the package numba-cuda is
installed, that one: it takes the name over. Both compile PTX without a GPU, if libNVVM is there. numba-cuda-mlir, the
successor, is not among the choices: it makes no PTX without a driver, and its intrinsics are not written in LLVM's
instructions.
"""

import importlib.util
import types as python_types
from collections.abc import Callable
from typing import Any, Final

INSTALL: Final = 'python -m pip install "numba-cuda[cu13]" cuda-core'
"""The command that installs a compiler for CUDA, its libraries, and the launcher of kernels."""


def _missing(error: Exception) -> ImportError:
    """Return what is said where a library of CUDA's is not there, for which each provider has an error of its own."""
    what = str(error).strip().partition("\n")[0]
    return ImportError(
        "compiling for CUDA needs its runtime, libNVVM and NVRTC, of one version of CUDA: "
        f"{INSTALL}; or set CUDA_HOME to the folder of a CUDA toolkit ({what})"
    )


def _numba_cuda() -> Any:
    try:
        return importlib.import_module("numba.cuda")
    except (OSError, RuntimeError) as error:
        raise _missing(error) from error


cuda: Final = _numba_cuda()


_OWN: Final = importlib.util.find_spec("numba_cuda") is None
"""Whether it is Numba's own target."""


def extending() -> python_types.ModuleType:
    """Return the provider's module with `intrinsic`; it exists only where kernels are compiled."""
    return importlib.import_module("numba.extending" if _OWN else "numba.cuda.extending")


def types() -> Any:
    """Return the provider's types."""
    return importlib.import_module("numba.core.types" if _OWN else "numba.cuda.types")


def compile_ptx(function: Callable[..., None], arguments: tuple[Any, ...], capability: tuple[int, int]) -> str:
    """Compile a kernel for a device's compute capability, with or without a GPU on this machine.

    Raises:
        ImportError: the compiler's libraries are not installed.
    """
    nvvm_error: type[Exception] = importlib.import_module("numba.cuda.cudadrv.error").NvvmSupportError
    try:
        text, _ = cuda.compile_ptx(function, types().void(*arguments), cc=capability)
    except (OSError, RuntimeError, nvvm_error) as error:
        raise _missing(error) from error
    return str(text)
