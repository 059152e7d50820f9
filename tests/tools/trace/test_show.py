"""`aiodist trace show` and `aiodist trace html`: the summary, who is a straggler, and files that cannot be read."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist import CollectiveError, ReplicaContext
from aiodist._tools.cli import main
from aiodist._tools.trace.file import read_trace
from aiodist._tools.trace.show import count_up
from aiodist.testing import run_replicas
from tests.runtime.programs import mirrored, run
from tests.tools.command import usage_error


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trace a program in which replica 1 takes 10 s longer than the others, on a virtual clock."""

    async def step() -> None:
        ctx = aiodist.get_replica_context()
        for _ in range(2):
            await asyncio.sleep(11 if ctx.replica_id_in_sync_group == 1 else 1)
            await ctx.all_reduce("SUM", 1.0)
        if ctx.replica_id_in_sync_group == 2:
            await ctx.barrier()
        await ctx.all_reduce("MEAN", 1.0)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(CollectiveError), aiodist.trace("run.json") as path:
        run_replicas(step, 3)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_summary_has_runs_calls_stragglers_and_the_report(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "show", file)
    lines = [line.split() for line in text.splitlines()]
    assert "1 run, 3 collectives, 9 calls" in " ".join(lines[0])
    assert ["1", "step", "3", "3", "22.0", "s", "CollectiveMismatchError", "at", "#2"] in lines
    (reduced,) = [line for line in lines if line[:1] == ["all_reduce(SUM,"]]
    assert reduced[-7:] == ["2", "48", "B", "40.0", "s", "10.0", "s"]
    assert ["1", "CPU:1", "40.0", "s", "2", "of", "3", "22.0", "s", "0"] in lines
    assert "run 1: CollectiveMismatchError: replicas disagree at collective #2\n" in text
    assert ["> replica 2", "CPU:2", "barrier()"] in [re.split(r"  +", line)[:3] for line in text.splitlines()]


def test_summary_is_not_cut_off_on_a_narrow_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "2 of 3" in shown(capsys, "show", file)


@pytest.mark.parametrize(("seconds", "held_up"), [((1, 1, 1), 0), ((5, 1, 1), 24)])
def test_straggler_is_the_replica_that_computes_longest_not_the_last_to_arrive(
    tmp_path: Path, seconds: tuple[float, ...], held_up: float
) -> None:
    """Replicas compute without awaiting, so the one whose turn is last arrives last."""
    now = 0.0

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return now

    async def program(ctx: ReplicaContext) -> None:
        nonlocal now
        for _ in range(3):
            now += seconds[ctx.replica_id_in_sync_group]
            await ctx.barrier()

    with aiodist.trace(tmp_path / "run.json") as path, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(run(mirrored(3), program))
    rows = {row.replica: row for row in count_up(read_trace(path)).replicas}
    assert {replica: row.last for replica, row in rows.items()} == {0: 0, 1: 0, 2: 3}
    assert [rows[i].held_up_seconds for i in range(3)] == pytest.approx([held_up, 0, 0])
    assert [rows[i].own_seconds for i in range(3)] == pytest.approx([3 * each for each in seconds])


def test_trace_without_runs_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with aiodist.trace(tmp_path / "run.json"):
        pass
    assert shown(capsys, "show", tmp_path / "run.json").startswith("0 runs, 0 collectives, 0 calls")
    assert shown(capsys, "html", tmp_path / "run.json") == f"wrote {tmp_path / 'run.html'}\n"


BAD = {
    "": "JSONDecodeError",
    '{"traceEvents": [': "JSONDecodeError",
    "\udcff": "UnicodeDecodeError",
    "[" * 100_000: "RecursionError",
    '{"traceEvents": []}': "traces of other programs open in https://ui.perfetto.dev",
    '{"otherData": {"aiodist_trace": 1}, "traceEvents": [{"ph": "X"}]}': "its version is 1, and",
    '{"traceEvents": [{"ph": "X", "cat": "run"}], "otherData": {"aiodist_trace": 2}}': "KeyError: 'args'",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:70])
def test_file_that_is_no_trace_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "bad.json").write_text(text, errors="surrogateescape")
    error = usage_error(capsys, "trace", "show", str(tmp_path / "bad.json"))
    assert error.startswith(f"aiodist: error: {tmp_path / 'bad.json'} is not a trace that this aiodist wrote")
    assert BAD[text] in error
    assert error.count("\n") == 1


def without_ends(events: list[Any]) -> None:
    events[:] = [each for each in events if each.get("args", {}).get("end") is None]


def with_a_huge_number(events: list[Any]) -> None:
    next(each for each in events if each.get("cat") == "collective")["args"]["bytes"] = 10**400


@pytest.mark.parametrize("command", ["show", "html"])
@pytest.mark.parametrize(("change", "error"), [(without_ends, "KeyError: 0"), (with_a_huge_number, "OverflowError")])
def test_damage_inside_a_trace_is_reported(
    file: Path, capsys: pytest.CaptureFixture[str], command: str, change: Callable[[list[Any]], None], error: str
) -> None:
    trace = json.loads(file.read_text())
    change(trace["traceEvents"])
    file.write_text(json.dumps(trace))
    assert f"run.json is not a trace that this aiodist wrote ({error}" in usage_error(
        capsys, "trace", command, str(file)
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("show missing.json", "cannot read missing.json: No such file or directory"),
        ("html .", "Is a directory"),
        ("html run.json -o missing/page.html", "cannot write"),
        ("html run.json -o ./run.json", "the page would replace the trace ./run.json"),
    ],
)
@pytest.mark.usefixtures("file")
def test_file_that_cannot_be_read_or_written_is_reported(
    capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    error = usage_error(capsys, "trace", *command.split())
    assert message in error
    assert error.count("\n") == 1
