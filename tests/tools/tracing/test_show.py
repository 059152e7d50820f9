"""`aiodist trace show` and `aiodist trace html`, as a person starts them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist import CollectiveError, MirroredStrategy
from aiodist._tools.cli import main
from aiodist._tools.trace.reader import TraceFileError, read_trace
from aiodist._tools.trace.summary import count_up, duration, size
from tests.tools.tracing.traced import virtual_time


def trace_of(path: Path, replicas: int = 3, *, parts_ways: bool = False) -> Path:
    """Trace a program in which replica 1 takes 10 s longer than the others, on a clock of its own."""

    async def step() -> None:
        ctx = aiodist.get_replica_context()
        for _ in range(2):
            await asyncio.sleep(11 if ctx.replica_id_in_sync_group == 1 else 1)
            await ctx.all_reduce("SUM", 1.0)
        if parts_ways and ctx.replica_id_in_sync_group == 2:
            await ctx.barrier()
        await ctx.all_reduce("MEAN", 1.0)

    with aiodist.trace(path):
        try:
            virtual_time(MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).run(step))
        except CollectiveError:
            assert parts_ways
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], path: Path) -> Any:
    return json.loads(shown(capsys, "show", path, "--json"))


def test_summary_tells_runs_calls_and_stragglers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in shown(capsys, "show", trace_of(tmp_path / "run.json")).splitlines()]
    assert "1 run, 3 collectives, 9 calls" in " ".join(lines[0])
    assert ["1", "step", "3", "3", "22.0", "s", "returned"] in lines
    (reduced,) = [line for line in lines if "all_reduce(SUM," in line]
    assert reduced[-7:] == ["2", "48", "B", "40.0", "s", "10.0", "s"]
    assert ["1", "CPU:1", "40.0", "s", "2", "of", "3", "22.0", "s", "0"] in lines


def test_replica_that_takes_longest_is_the_straggler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = as_json(capsys, trace_of(tmp_path / "run.json"))["replicas"]
    assert (first["replica"], first["held_up_seconds"], first["last"]) == (1, pytest.approx(40), 2)
    assert second["held_up_seconds"] == third["held_up_seconds"] == pytest.approx(0)
    assert second["wait_seconds"] == third["wait_seconds"] == pytest.approx(20)


def test_replicas_that_take_turns_hold_up_nobody(tmp_path: Path) -> None:
    """Each computes for a second without awaiting: the last in turn comes last, and is no straggler."""
    now = [0.0]

    async def step() -> None:
        for _ in range(3):
            now[0] += 1
            await aiodist.get_replica_context().barrier()

    with aiodist.trace(tmp_path / "run.json"):
        virtual_time(MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).run(step), now)
    rows = count_up(read_trace(tmp_path / "run.json")).replicas
    assert {row.replica: row.last for row in rows} == {0: 0, 1: 0, 2: 3}
    assert [row.held_up_seconds for row in rows] == pytest.approx([0, 0, 0])
    assert [row.own_seconds for row in rows] == pytest.approx([3, 3, 3])


def test_replica_that_computes_before_its_turn_is_over_is_the_straggler(tmp_path: Path) -> None:
    now = [0.0]

    async def step() -> None:
        now[0] += 5 if aiodist.get_replica_context().replica_id_in_sync_group == 0 else 1
        await aiodist.get_replica_context().barrier()

    with aiodist.trace(tmp_path / "run.json"):
        virtual_time(MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).run(step), now)
    first = count_up(read_trace(tmp_path / "run.json")).replicas[0]
    assert (first.replica, first.held_up_seconds) == (0, pytest.approx(8))


def test_disagreement_is_shown_as_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "show", trace_of(tmp_path / "run.json", parts_ways=True))
    assert "CollectiveMismatchError at #2" in text
    assert "run 1: CollectiveMismatchError: replicas disagree at collective #2\n" in text
    assert "> replica 2  CPU:2  barrier()" in text
    verdict = as_json(capsys, tmp_path / "run.json")["runs"][0]["verdict"]
    assert (verdict["reason"], verdict["suspects"]) == ("kind", [2])


def test_trace_without_runs_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with aiodist.trace(tmp_path / "run.json"):
        pass
    assert shown(capsys, "show", tmp_path / "run.json").startswith("0 runs, 0 collectives, 0 calls")
    assert "wrote" in shown(capsys, "html", tmp_path / "run.json")


def test_trace_that_was_written_anew_by_another_program_is_read(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "run.json")
    document = json.loads(path.read_text())
    before = read_trace(path)
    path.write_text(json.dumps({name: document[name] for name in reversed(document)}, indent=3))
    assert read_trace(path) == before


BAD = {
    "": "it is not complete JSON",
    '{"traceEvents": [': "it is not complete JSON",
    "[1, 2]": "it has no traceEvents",
    '{"traceEvents": []}': "other programs' traces open in https://ui.perfetto.dev",
    '{"traceEvents": [], "otherData": {"aiodist_trace": 99}}': "its version is 99",
    '{"traceEvents": [{}], "otherData": {"aiodist_trace": 1}}': "an event lacks what it should have",
    '{"traceEvents": [{"ph": "X", "cat": "run"}], "otherData": {"aiodist_trace": 1}}': "an event lacks",
    '{"traceEvents": [3], "otherData": {"aiodist_trace": 1}}': "an event lacks what it should have",
}


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("command", ["show", "html"])
def test_bad_file_gives_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    (tmp_path / "bad.json").write_text(text)
    assert main(["trace", command, str(tmp_path / "bad.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert BAD[text] in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing.json", "No such file or directory"), (".", "Is a directory"), ("b", "it is not complete JSON")],
)
def test_file_that_cannot_be_read_gives_one_line(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceFileError, match=said):
        read_trace(tmp_path / name)


def test_every_cut_of_a_trace_is_refused(tmp_path: Path) -> None:
    text = trace_of(tmp_path / "run.json", 2).read_text()
    for length in range(0, len(text) - 2, 101):
        (tmp_path / "cut.json").write_text(text[:length])
        with pytest.raises(TraceFileError):
            read_trace(tmp_path / "cut.json")


def test_page_that_cannot_be_written_gives_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_of(tmp_path / "run.json", 2)
    assert main(["trace", "html", str(path), "-o", str(tmp_path / "missing" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (2e-9, "2 ns"), (1.234e-6, "1.23 µs"), (45.6e-6, "45.6 µs"), (0.9996, "1.00 s"), (123.4, "123 s")],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 30, "3.00 GiB")])
def test_sizes_have_three_digits(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
