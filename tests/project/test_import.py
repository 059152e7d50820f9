"""What `import aiodist` costs and loads, in a fresh process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from tests.project.paths import run_python

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = {"numba", "llvmlite", "trio", "uvloop", "rich", "sklearn", "scipy", "torch", "jax", "tensorflow", "ml_dtypes"}


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    program = "import aiodist, sys, threading; print(*sys.modules, threading.active_count())"
    *loaded, threads = run_python(["-W", "error", "-X", "dev", "-c", program], tmp_path).split()  # and warns of nothing
    assert loaded[0] == "sys"
    assert {"aiodist", "numpy"} <= set(loaded)
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()
    assert threads == "1"


LATER = {
    "aiodist._core.analysis", "aiodist._core.render", "aiodist._collectives.device", "aiodist._gpu.steps",
    "aiodist._runtime.inspection", "aiodist._tools.trace.file", "aiodist._workers", "json", "pathlib",
}  # fmt: skip
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
    assert [name for name in LATER if find_spec(name) is None] == []
    assert set(run_python(["-c", FIRST_RUN], tmp_path).split()) & LATER == set()


def test_a_name_that_is_loaded_later_is_there_for_everybody(tmp_path: Path) -> None:
    lines = ["import pickle", "import aiodist", "print('MultiWorkerMirroredStrategy' in dir(aiodist))"]
    lines += ["from aiodist import *", "print(MultiWorkerMirroredStrategy is aiodist.MultiWorkerMirroredStrategy)"]
    lines += ["print(pickle.loads(pickle.dumps(MultiWorkerMirroredStrategy)) is MultiWorkerMirroredStrategy)"]
    lines += ["print(hasattr(aiodist, 'MultiWorkerStrategy'))"]
    assert run_python(["-c", "\n".join(lines)], tmp_path).split() == ["True", "True", "True", "False"]
