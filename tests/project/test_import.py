"""The modules that `import aiodist` and a first run load, in a fresh process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.project.paths import run_python

HEAVY = {"numba", "llvmlite", "trio", "uvloop", "rich", "sklearn", "scipy", "torch", "jax", "tensorflow", "ml_dtypes"}


def test_import_loads_nothing_heavy_and_does_not_warn(tmp_path: Path) -> None:
    program = "import aiodist, sys, threading; print(*sys.modules, threading.active_count())"
    *loaded, threads = run_python(["-W", "error", "-X", "dev", "-c", program], tmp_path).split()
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
before = set(sys.modules)  # with those that .pth files of the environment import when Python starts
import aiodist

async def step():
    return await aiodist.get_replica_context().all_reduce("SUM", {"w": np.ones(3, np.float32)})

asyncio.run(aiodist.MirroredStrategy(["CPU:0", "CPU:1"]).run(step))
print(*set(sys.modules) - before)
"""


def test_modules_that_a_successful_run_does_not_need_are_not_loaded(tmp_path: Path) -> None:
    assert all(map(find_spec, LATER))
    assert set(run_python(["-c", FIRST_RUN], tmp_path).split()) & LATER == set()


LAZY_NAME = """
import pickle, aiodist
print("MultiWorkerMirroredStrategy" in dir(aiodist), hasattr(aiodist, "MultiWorkerStrategy"))
from aiodist import *
print(pickle.loads(pickle.dumps(MultiWorkerMirroredStrategy)) is aiodist.MultiWorkerMirroredStrategy)
"""


def test_a_name_that_is_loaded_later_is_seen_by_dir_star_imports_and_pickle(tmp_path: Path) -> None:
    assert run_python(["-c", LAZY_NAME], tmp_path).split() == ["True", "False", "True"]
