"""Jobs of real workers, started by `aiodist run`, each with a wall-clock limit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.tools.jobs import Jobs

JOB = Path(__file__).with_name("job.py")


def job(workers: int, *arguments: str) -> tuple[int, str]:
    """Run `job.py`; return its exit code and output. It must leave no process and no temporary file."""
    with closing(Jobs()) as jobs, TemporaryDirectory() as folder:
        variables = {"TMPDIR": folder, "PYTHONWARNINGS": "error::DeprecationWarning"}
        started = jobs.start(["-n", str(workers), str(JOB), *arguments], **variables)
        code = started.end()
        assert list(Path(folder).iterdir()) == [], started.output
        return code, started.output
