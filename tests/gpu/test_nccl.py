"""NCCL by its real binding: on a library that stands in for it, in a job of real workers; and on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist.gpu import nccl, process
from aiodist.gpu.nccl import Buffer
from aiodist.vocabulary import gpus
from aiodist_kernels import ReduceOp
from tests.gpu import stand_in
from tests.project.paths import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_SECONDS = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The libraries that stand in for CUDA's and NCCL's."""
    made = tmp_path_factory.mktemp("libraries")
    for package, name in {"cuda": "cuda-core", "nccl": "nccl4py", "mpi4py": "mpi4py"}.items():
        if sys.platform != "linux" or importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} is not installed")
    if not stand_in.build(made):
        pytest.skip("there is no compiler for C")
    return made


@pytest.mark.timeout(180)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_are_linked_by_the_real_binding(workers: int, folder: Path) -> None:
    command = [sys.executable, "-m", "aiodist", "run", "-n", str(workers), "-m", "tests.gpu.nccl_job"]
    libraries = {"LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": str(folder / "libnccl.so.2")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment() | libraries,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a link of one" in done.stdout
    assert ("a failing step" in done.stdout) is (workers > 1)


def real() -> nccl.Library:
    """Return NCCL, where there is a GPU."""
    if not gpus.find().gpus:
        pytest.skip(f"no GPU: {gpus.find().missing}")
    try:
        return nccl.library()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "int32", "uint64"])
def test_link_of_one_on_a_gpu(kind: str) -> None:
    library, driver = real(), process.executor().driver
    values = np.arange(1000).astype(kind)
    with process.enqueuing, driver.using():
        memory = driver.upload(0, values.view(np.uint8))
        stream = driver.handle(0)
        link = library.link(1, 0, library.new_id())
    while not link.is_ready():
        os.sched_yield()
    with process.enqueuing, driver.using():
        driver.handle(0)
        link.all_reduce(ReduceOp.SUM, [Buffer(memory.address, values.size, kind)], stream)
    while not link.is_ready():
        os.sched_yield()
    found: Any = driver.host_memory(values.nbytes)
    with process.enqueuing, driver.using():
        driver.copy_out(0, -1, found.address, memory.address, values.nbytes)
        driver.wait_for(driver.record(driver.stream(0)))
    assert stand_in.read(found, values).tolist() == values.tolist()
    link.abort()
