"""What `import aiodist` costs and brings, in a fresh process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.project.paths import run_python

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = {"numba", "llvmlite", "trio", "uvloop", "rich", "sklearn", "scipy", "torch", "jax", "tensorflow", "ml_dtypes"}


def test_import_brings_nothing_heavy(tmp_path: Path) -> None:
    program = "import aiodist, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(run_python(["-c", program], tmp_path).split())
    assert {"aiodist", "numpy"} <= loaded
    assert loaded & HEAVY == set()


def test_import_prints_and_warns_nothing(tmp_path: Path) -> None:
    assert run_python(["-W", "error", "-X", "dev", "-c", "import aiodist, aiodist_kernels"], tmp_path) == ""


def test_import_starts_no_thread(tmp_path: Path) -> None:
    program = "import aiodist, threading; print(threading.active_count())"
    assert run_python(["-c", program], tmp_path) == "1\n"


LATER = {
    "aiodist._collectives.device",
    "aiodist.collective.verdict",
    "aiodist._gpu.steps",
    "aiodist.replica.looking",
    "aiodist.replica.suspension",
    "aiodist.replica.team",
    "aiodist._tools.trace.writer",
    "aiodist.workers.state",
    "json",
    "pathlib",
}
FIRST_RUN = """
import asyncio, sys
import numpy as np
before = set(sys.modules)  # NumPy's, and those that packages of the environment bring by a .pth file when Python starts
import aiodist

async def step():
    return await aiodist.get_replica_context().all_reduce("SUM", {"w": np.ones(3, np.float32)})

asyncio.run(aiodist.MirroredStrategy(["CPU:0", "CPU:1"]).run(step))
print(*set(sys.modules) - before)
"""


def test_import_and_a_run_that_goes_well_leave_out_what_they_do_not_need(tmp_path: Path) -> None:
    assert set(run_python(["-c", FIRST_RUN], tmp_path).split()) & LATER == set()


def test_a_name_that_is_loaded_later_is_there_for_everybody(tmp_path: Path) -> None:
    lines = ["import pickle", "import aiodist", "print('MultiWorkerMirroredStrategy' in dir(aiodist))"]
    lines += ["from aiodist import *", "print(MultiWorkerMirroredStrategy is aiodist.MultiWorkerMirroredStrategy)"]
    lines += ["print(pickle.loads(pickle.dumps(MultiWorkerMirroredStrategy)) is MultiWorkerMirroredStrategy)"]
    lines += ["print(hasattr(aiodist, 'MultiWorkerStrategy'))"]
    assert run_python(["-c", "\n".join(lines)], tmp_path).split() == ["True", "True", "True", "False"]
