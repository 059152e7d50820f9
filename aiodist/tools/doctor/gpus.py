"""Which GPUs there are, and whether arrays on them can be reduced."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from aiodist.gpu import nccl
from aiodist.tools.doctor.findings import Finding, Section
from aiodist.vocabulary import gpus as devices
from aiodist_kernels import ReduceOp
from aiodist_kernels.cuda.forms import form_for
from aiodist_kernels.rules import rule_for

PACKAGES = ("numba-cuda", "cuda-core")
_LEFT_OUT = "arrays on GPUs of several workers go through the host"


def gpus() -> Section:
    """Look at the GPUs; it compiles a kernel where a compiler is installed."""
    found = devices.find()
    remedy = f"{devices.INSTALL} to reduce arrays on GPUs" + ("" if found.gpus else ", where there are any")
    versions = {name: _version(name) for name in PACKAGES}
    packages = [Finding(name, known or "not installed", None if known else remedy) for name, known in versions.items()]
    compiler = [_compiler(remedy)] if versions["numba-cuda"] else []
    return Section("GPUs", [*_devices(found), *packages, *compiler, _nccl(found)])


def _devices(found: devices.Found) -> list[Finding]:
    driver = Finding("driver", f"for CUDA {found.driver}" if found.driver else "none")
    if not found.gpus:
        return [driver, Finding("devices", f"none: {found.missing}")]
    return [
        driver,
        *(
            Finding(f"GPU:{gpu.ordinal}", f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}")
            for gpu in found.gpus
        ),
    ]


def _nccl(found: devices.Found) -> Finding:
    try:
        return Finding("NCCL", nccl.library().version)
    except ImportError as error:
        remedy = f"{nccl.INSTALL}; without it, {_LEFT_OUT}" if len(found.gpus) > 0 else None
        return Finding("NCCL", str(error).partition(":")[0], remedy)


def _compiler(remedy: str) -> Finding:
    begin = time.perf_counter()
    form = form_for(rule_for(ReduceOp.SUM, np.dtype(np.float32)), 4)
    try:
        from aiodist_kernels.cuda.compiled import compile_form

        compile_form(form, (9, 0))
    except ImportError as error:
        return Finding("kernels", f"do not compile: {str(error).splitlines()[0]}", remedy)
    return Finding("kernels", f"compile; the first took {time.perf_counter() - begin:.1f} s")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
