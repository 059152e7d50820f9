"""All engines do what a communicator must, for 1, 2 and 4 workers, and programs have the same values on all of them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import cache

import anyio
import pytest

from aiodist._workers.engines.simulated import SimulatedCluster, alone
from tests.tools.command import environment
from tests.workers import conformance
from tests.workers.job import all_ordered_sums, all_values, job
from tests.workers.simulated import Job

each_case = pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)


@each_case
def test_local_engine(case: conformance.Case) -> None:
    conformance.go_through(case, alone())


@pytest.mark.parametrize("size", [1, 2, 4])
@each_case
def test_simulated_engine(case: conformance.Case, size: int) -> None:
    conformance.go_through_together(case, SimulatedCluster(size).communicators)


@cache
def digest_of_simulated(size: int) -> str:
    """Return the digest of the program's values, from the simulated engine."""
    digests = anyio.run(Job(*[2] * size).everywhere, all_values)
    assert len(set(digests)) == 1
    return str(digests[0])


@cache
def digest_of_ordered_sums() -> str:
    """Return the digest of ordered sums of four replicas on one worker."""
    return all_ordered_sums(alone(), 4)


def check(size: int, engine: str, code: int, output: str) -> None:
    assert code == 0, output
    assert len(re.findall(f"{engine} conforms", output)) == size
    assert re.findall(r"digest (\w+)", output) == [digest_of_simulated(size)] * size
    assert re.findall(r"ordered (\w+)", output) == [digest_of_ordered_sums()] * size, "the same bits for every layout"


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py")
def test_mpi_engine() -> None:
    check(4, "mpi", *job(4, "conforms"))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
def test_torch_engine() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, job.__code__.co_filename, "conforms"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=170)
    check(2, "torch", ended.returncode, ended.stdout + ended.stderr)
