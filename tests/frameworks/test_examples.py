"""The programs in docs/examples run as a reader would run them, with and without the package that they need."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import runpy
import subprocess
import sys

import pytest

from tests.project.paths import ROOT, environment

Capture = pytest.CaptureFixture[str]
EXAMPLES = ROOT / "docs" / "examples"
HOW_TO = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
PROGRAMS = {"torch": "train_pytorch.py", "jax": "train_jax.py", "sklearn": "train_digits.py"}
NEEDS = PROGRAMS | {"starlette": "web_service.py", "trio": "on_trio.py", "tensorflow": "custom_training_tf.py"}
NAMES = {"torch": "PyTorch", "jax": "JAX", "sklearn": "scikit-learn", "starlette": "Starlette", "trio": "trio",
         "tensorflow": "TensorFlow"}  # fmt: skip
PACKAGES = {"sklearn": "scikit-learn", "starlette": "starlette uvicorn"}
SHOWN = {"actor_learner.py": [], "checkpoints.py": [], "on_trio.py": ["trio"], "custom_training.py": [],
         "custom_training_tf.py": ["tensorflow"]}  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=50, check=False)


def skip_without(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{NAMES.get(package, package)} is not installed")


@pytest.mark.parametrize("framework", PROGRAMS)
def test_loss_curves_do_not_depend_on_the_number_of_replicas(framework: str, capsys: Capture) -> None:
    skip_without(framework)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / PROGRAMS[framework]), run_name="__main__")
    printed = capsys.readouterr().out
    rows = [line.split() for line in re.findall(r"^ *\d+(?: +\d\.\d{7})+$", printed, re.MULTILINE)]
    assert [int(step) for step, *_ in rows] == [1, 4, 10, 20, 40]
    assert float(rows[-1][1]) < 0.3 * float(rows[0][1])
    for _, first, *others in rows:
        assert [float(loss) for loss in others] == [pytest.approx(float(first), abs=1e-5)] * len(others)
    assert re.search(r"^largest difference at any step: \d\.\de-0\d, allowed: 1e-05$", printed, re.MULTILINE)


@pytest.mark.parametrize("package", NEEDS)
def test_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / NEEDS[package]), run_name="__main__")
    install = PACKAGES.get(package, package)
    sentence = f"{NEEDS[package]} needs {NAMES[package]}, which is not installed: pip install {install}\n"
    assert (ended.value.code, *capsys.readouterr()) == (None, sentence, "")


@pytest.mark.parametrize("name", SHOWN)
def test_prints_what_the_page_shows(name: str, capsys: Capture) -> None:
    skip_without(*SHOWN[name])
    if "tensorflow" in SHOWN[name]:  # which prints on standard error, and stays in the process
        printed = run(str(EXAMPLES / name)).stdout
    else:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed = capsys.readouterr().out
    shown = HOW_TO.partition(f"$ python docs/examples/{name.replace('_tf', '')}\n")[2].partition("```")[0]
    assert printed == shown


def test_web_service_stops_training_on_request() -> None:
    skip_without("starlette", "httpx")
    httpx = importlib.import_module("httpx")
    service = runpy.run_path(str(EXAMPLES / "web_service.py"))
    app, training = service["app"], service["training"]

    async def use() -> None:
        transport = httpx.ASGITransport(app)
        async with training(app), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            found = {"step": 0, "running": True}
            while found["step"] < 3:
                assert found["running"]
                await asyncio.sleep(0)  # a request within one process suspends nobody
                found = (await client.get("/metrics")).json()
            stopped = (await client.post("/stop")).json()["steps"]
            found = (await client.get("/metrics")).json()
            assert stopped == [found["step"]] * 4
            assert not found["running"]

    asyncio.run(use())


def test_suite_of_training_code_passes() -> None:
    options = ("-q", "-p", "aiodist.testing.pytest_plugin", "-p", "no:cacheprovider", "-c", "/dev/null")
    ended = run("-m", "pytest", *options, "--rootdir", str(EXAMPLES), str(EXAMPLES / "test_training.py"))
    assert "7 passed" in ended.stdout, ended.stdout


def test_notebook_is_on_the_page_and_prints_the_results() -> None:
    file = EXAMPLES / "notebook.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(f"```py\n{cell}\n```" in HOW_TO for cell in cells[2:])
    skip_without("nbclient", "ipykernel")
    program = (
        "import nbformat, nbclient, sys; book = nbformat.read(sys.argv[1], 4); nbclient.NotebookClient(book).execute();"
        "print(*(out.text for cell in book.cells for out in cell.get('outputs', ())), sep='', end='')"
    )
    ended = run("-c", program, str(file))
    assert ended.stdout == "[ 0.998 -1.996] True\n(1,) barrier()\n", ended.stderr
