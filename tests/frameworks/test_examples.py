"""The programs in docs/examples: run as their reader would, with the framework and without it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.project.paths import ROOT, environment

PROGRAMS = {"torch": "train_pytorch.py", "jax": "train_jax.py", "sklearn": "train_digits.py"}
NAMES = {"torch": "PyTorch", "jax": "JAX", "sklearn": "scikit-learn"}
WITHOUT = "import runpy, sys; sys.modules[{!r}] = None; runpy.run_path({!r}, run_name='__main__')"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("framework", PROGRAMS)
def test_loss_curves_are_the_same_however_many_replicas_there_are(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{NAMES[framework]} is not installed")
    ended = run(str(ROOT / "docs" / "examples" / PROGRAMS[framework]))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    rows = [line.split() for line in re.findall(r"^ *\d+(?: +\d\.\d{7})+$", ended.stdout, re.MULTILINE)]
    assert [int(step) for step, *_ in rows] == [1, 4, 10, 20, 40]
    assert float(rows[-1][1]) < 0.3 * float(rows[0][1])
    for _, first, *others in rows:
        assert [float(loss) for loss in others] == [pytest.approx(float(first), abs=1e-5)] * len(others)
    assert re.search(r"^largest difference at any step: \d\.\de-0\d, allowed: 1e-05$", ended.stdout, re.MULTILINE)


@pytest.mark.parametrize("framework", PROGRAMS)
def test_without_the_framework_one_sentence_says_so(framework: str) -> None:
    program = ROOT / "docs" / "examples" / PROGRAMS[framework]
    ended = run("-c", WITHOUT.format(framework, str(program)))
    package = NAMES[framework].lower() if framework == "sklearn" else framework
    expected = f"{program.name} needs {NAMES[framework]}, which is not installed: pip install {package}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, expected, "")
