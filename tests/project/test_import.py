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
