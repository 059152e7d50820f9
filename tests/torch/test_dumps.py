"""`aiodist explain`: what is said of jobs by their dumps, and of files that are no dumps. Torch is not needed."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from aiodist._torch.dumps import DumpError, read, read_all
from aiodist._torch.explain import Explanation, explain
from tests.project.paths import ROOT
from tests.tools.command import exit_code
from tests.torch.recorded import Job, as_bytes


def said_of(job: Job, folder: Path, *, without: tuple[int, ...] = (), as_json: bool = False) -> Explanation:
    return explain(read_all(job.write(folder, without=without, as_json=as_json)))


# Jobs: each with the headline of its report, who is suspected, and what else the text must say.


def on_one_line(text: str) -> str:
    """Return a text without its line breaks and columns."""
    return " ".join(text.split())


def agreeing() -> Job:
    """NCCL counts elements; places differ in correct programs; and what rank r gives and takes may be its own."""
    job = Job(4, {"7": ("dp", [1, 3])}).calls("""
        0: all_reduce [6]
        1: all_reduce [2, 3] at 1
        2: all_reduce [2, 3] at 2
        3: all_reduce [2, 3] at 3
        0: all_to_all [4]
        1: all_to_all [5]
        2,3: all_to_all [6]
        *: gather [3] of 7
    """)
    job.entries[1][-1]["output_sizes"] = [[3], [3]]
    return job


def skipped() -> Job:
    steps = "*: all_reduce [3] at 5\n*: broadcast [2] at 6\n" * 3
    return Job(4).calls(f"{steps}*: all_reduce [3] at 5\n!1: broadcast [2] at 6\n1: all_reduce [3] at 5")


def late() -> Job:
    return Job(4).calls("*: all_reduce [3] at 5\n!2: all_reduce [3] at 6")


def held_up_elsewhere() -> Job:
    return Job(4, {"1": ("tp", [0, 1]), "2": ("tp", [2, 3])}).calls("""
        *: barrier
        *: all_reduce [3] of 1
        2: all_reduce [3] of 2
        0,1: all_gather [3]
    """)


def never_sent() -> Job:
    return Job(3).calls("*: all_reduce [3]\n1: recv 1<-2 [3] at 8")


def other_dtype() -> Job:
    job = Job(4).calls("!2: all_reduce [3]")
    job.call(2, "all_reduce", [3], input_dtypes=["Half"], output_dtypes=["Half"])
    return job


def issued_as_one() -> Job:
    job = Job(2)
    for rank in range(2):
        with job.as_one(rank):
            job.call(rank, "all_reduce", [3])
            job.call(rank, "all_gather", [3 + rank])
    return job


def not_begun() -> Job:
    job = Job(4)
    job.all("all_reduce", [3], state="started", without=[3])
    job.call(3, "all_reduce", [3], state="scheduled")
    return job


def swapped() -> Job:
    """A helper's calls in another order, which NCCL combines; and rank 0 publishing, which is well."""
    job = Job(3)
    for source in range(3):
        for rank in range(3):
            job.call(rank, "broadcast", [3], line=20 if rank == source else 22)
    for rank in range(3):
        for caller in (31, 30) if rank == 1 else (30, 31):
            frames = [("average", 10), ("train", caller)]
            told = [{"name": name, "filename": "/job/train.py", "line": line} for name, line in frames]
            job.call(rank, "all_reduce", [3], frames=told)
    return job


_TWO = {"1": ("a", [0, 1]), "2": ("b", [0, 1])}
_JOBS: dict[str, tuple[Job, str, tuple[int, ...], list[str]]] = {
    "agreeing": (agreeing(), "no rank waits in a collective, and the calls of ranks 0-3 agree", (), []),
    "skipped": (
        skipped(), "ranks disagree at collective #7", (1,),
        ["> rank 1  nccl_trace_rank_1  all_reduce(float32[3])   /job/train.py:5 in step",
         "rank 1 skipped broadcast at /job/train.py:6, which ranks 0, 2 and 3 made as #7",
         "torch.distributed.all_reduce(stop, ", "Collective #7 is torch's sequence number 8."]),
    "rank 0 skipped": (
        Job(3).calls("!0: all_reduce [3] at 5\n0: barrier at 6"),
        "ranks disagree at collective #0", (0,), ["> rank 0  nccl_trace_rank_0  barrier()"]),
    "late": (
        late(), "collective #1 cannot be completed: rank 2 has not arrived, ranks 0, 1 and 3 wait in it", (2,),
        ["The latest call of rank 2, all_reduce(float32[3]) at /job/train.py:5, has ended."]),
    "other size": (
        Job(4).calls("!2: all_reduce [3]\n2: all_reduce [4]"),
        "ranks disagree at collective #0", (2,), ["all_reduce(float32[4])", "Nothing is broadcast"]),
    "other dtype": (
        other_dtype(), "ranks disagree at collective #0", (2,), ["all_reduce(float16[3])", "Values are never cast"]),
    "crossed groups": (
        Job(2, _TWO).calls("0: all_reduce [3] of 1 at 5\n1: all_reduce [3] of 2 at 7"),
        "ranks 0 and 1 wait for each other, each in another group's collective", (0, 1),
        ["rank 0 waits in all_reduce(float32[3]) #0 of group 'a' of ranks 0 and 1 (/job/train.py:5) for rank 1"]),
    "held up elsewhere": (
        held_up_elsewhere(),
        "collective #0 of group 'tp' of ranks 2 and 3 cannot be completed: rank 3 has not arrived, rank 2 waits in it",
        (3,), ["all ranks, #1 all_gather(float32[3]): ranks 0 and 1; without ranks 2 and 3", "in process group '2'"]),
    "never sent": (
        never_sent(), "rank 2 does not send what rank 1 is to receive", (1, 2),
        ["recv(float32[3], src=2)", "The latest call of rank 2, all_reduce(float32[3])"]),
    "receive in a ring": (
        Job(3).calls("0: recv 0<-2 [3]\n1: recv 1<-0 [3]\n2: recv 2<-1 [3]"),
        "ranks 0-2 wait for each other", (0, 1, 2), ["of the message from rank 1 to rank 2"]),
    "message against collective": (
        Job(2).calls("0: send 0->1 [3] at 8\n1: all_reduce [4] at 9"),
        "ranks 0 and 1 wait for each other", (0, 1), ["waits in all_reduce(float32[4])"]),
    "other size of a message": (
        Job(2).calls("0: send 0->1 [3]\n1: recv 1<-0 [4]"),
        "ranks disagree at the message from rank 0 to rank 1", (0, 1), ["batch_isend_irecv"]),
    "issued as one": (
        issued_as_one(), "ranks disagree at collective #0", (0, 1),
        ["The shape differs at value[1]: float32[3] on rank 0"]),
    "dropped calls, on rank 3 more than on others": (
        Job(4, capacity=5).calls("*: all_reduce [3]\n" * 20 + "3: all_reduce [3]"),
        "collective #20 cannot be completed: ranks 0-2 have not arrived, rank 3 waits in it", (0, 1, 2),
        ["Older calls of ranks 0-3 have been dropped"]),
    "not begun": (
        not_begun(), "collective #0 cannot be completed: all have arrived, but their values have not", (0, 1, 2, 3),
        ["It runs on ranks 0-2; the devices of rank 3 have not begun it."]),
    "swapped": (
        swapped(), "ranks disagree at collective #3", (1,), ["make the same two calls in opposite order"]),
    "group of gloo": (
        Job(4, {"1": ("", [0, 1])}, backend="gloo").calls("*: barrier\n1: all_reduce [3] of 1"),
        "collective #0 of group '1' of rank 1 has not ended: rank 1 called it, and who else is in the group is not",
        (1,), ["Gloo does not record the members of process groups"]),
}  # fmt: skip


@pytest.mark.parametrize(("job", "headline", "suspects", "texts"), _JOBS.values(), ids=_JOBS)
def test_what_is_said_of_a_job(
    job: Job, headline: str, suspects: tuple[int, ...], texts: list[str], tmp_path: Path
) -> None:
    found = said_of(job, tmp_path)
    said = on_one_line(str(found))
    assert said.startswith(headline)
    assert (found.report.suspects if found.report is not None else ()) == suspects
    assert [text for text in texts if on_one_line(text) not in said] == []
    assert "replica" not in str(found)
    assert "ctx." not in str(found)
    assert json.loads(json.dumps(found.to_dict()))["text"] == str(found)


def test_json_has_no_lines_and_says_the_same_otherwise(tmp_path: Path) -> None:
    found = said_of(skipped(), tmp_path, as_json=True)
    assert "rank 1 skipped broadcast at an unknown line, which ranks 0, 2 and 3 made as #7" in on_one_line(str(found))
    assert "JSON dumps do not contain the lines of the program; pickled ones do." in found.notes
    both = explain(read_all([tmp_path / "0.json", *skipped().write(tmp_path)[1:]]))
    assert both.report is not None
    assert both.report.suspects == (1,)


def test_ranks_without_a_dump_are_named_and_not_blamed(tmp_path: Path) -> None:
    job = late()
    found = said_of(job, tmp_path, without=(2,))
    assert str(found).startswith(
        "collective #1 cannot be completed: ranks 0, 1 and 3 wait in it, and nothing is known of rank 2"
    )
    assert "There is no dump of rank 2." in found.notes
    assert "waits in recv(float32[3], src=2), and nothing is known of rank 2" in str(
        said_of(never_sent(), tmp_path, without=(2,))
    )
    gloo = Job(2, backend="gloo")
    gloo.all("barrier", without=[1])
    dumps = read_all(gloo.write(tmp_path))
    assert "There is no dump of ranks 2 and 3." in explain(dumps, world_size=4).notes


def test_what_has_ended_without_a_rank_is_reported(tmp_path: Path) -> None:
    job = late()
    for rank in (0, 1, 3):
        job.entries[rank][-1]["state"] = "completed"
    found = said_of(job, tmp_path)
    assert found.report is None
    where = "all_reduce(float32[3]) at /job/train.py:6, #1 of all ranks,"
    assert found.notes[0] == f"{where} has ended on ranks 0, 1 and 3, but rank 2 had not called it:"


def test_source_newer_than_the_job_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("dist.all_reduce(x)\n")
    job = Job(2)
    job.call(0, "barrier", frames=[{"name": "<module>", "filename": str(script), "line": 1}])
    found = said_of(job, tmp_path)
    assert "dist.all_reduce(x)" in str(found)
    assert "train.py has changed since: the lines shown may not be those that ran." in found.notes


def test_hundreds_of_ranks_fit_a_screen(tmp_path: Path) -> None:
    job = Job(200)
    job.all("barrier", without=[70], line=3, state="started")
    text = str(said_of(job, tmp_path))
    said = on_one_line(text)
    assert "ranks 0-69 and 71-199 199 ranks barrier()" in said
    assert "> rank 70 nccl_trace_rank_70 elsewhere, after 0 collectives" in said
    assert len(text.splitlines()) < 12


def test_page_shows_what_is_said_of_its_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are those that PyTorch 2.13 records of it on gloo."""
    script = "docs/examples/ddp_that_hangs.py"
    lines = (ROOT / script).read_text().splitlines()
    model, forward, backward, barrier = (
        next(number for number, line in enumerate(lines, 1) if what in line)
        for what in ("DistributedDataParallel(", "mse_loss(", "loss.backward()", "dist.barrier()")
    )

    def at(line: int) -> list[dict[str, object]]:
        return [{"name": "train", "filename": script, "line": line}]

    job = Job(3, backend="gloo")
    for kind, size, line in (("all_gather", 1, model), ("broadcast", 6, model), ("broadcast", 17, model)):
        job.all(kind, [size], frames=at(line))
    job.all("all_reduce", [17], frames=at(backward))
    for size in (3, 1):
        job.all("broadcast", [size], frames=at(forward))
    for _ in range(4):
        job.all("all_reduce", [17], frames=at(backward))
    job.all("all_reduce", [17], frames=at(backward), without=[1])
    job.call(1, "barrier", frames=at(barrier))
    for entries in job.entries:
        entries[-1]["time_created_ns"] = 1 << 62  # after the script was written
    for rank in range(3):
        (tmp_path / f"dump_{rank}").write_bytes(as_bytes(job.dump(rank)))
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "torch.md").read_text()
    shown = page.partition("$ aiodist explain dump_*\n")[2].partition("```")[0]
    assert str(explain(read_all([tmp_path]))) + "\n" == shown


# Files.


def test_folders_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, job, code in (("well", agreeing(), 0), ("late", late(), 1)):
        (tmp_path / name).mkdir()
        job.write(tmp_path / name)
        (tmp_path / name / "log.txt").write_text("no dump")
        assert exit_code("explain", str(tmp_path / name)) == code
    assert exit_code("explain", "--json", str(tmp_path / "late")) == 1
    said = capsys.readouterr().out
    assert json.loads(said[said.index("\n{") :])["report"]["suspects"] == [2]
    assert exit_code("explain", str(tmp_path / "absent_0")) == 2
    assert "aiodist: error:" in capsys.readouterr().err


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("run",)


def _nested(levels: int) -> bytes:
    return b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


_ENTRY = late().dump(0)["entries"][0]
_DUMP = late().dump(0)
_FRAME = _ENTRY["frames"][-1]
_BROKEN: list[tuple[str, bytes, str]] = [
    ("empty", b"", "is empty"),
    ("text", b"Traceback (most recent call last):", "is neither JSON nor a pickle"),
    ("function", pickle.dumps({"entries": _Runs()}, 2), "dumps contain only plain containers"),
    ("class", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.", "has GLOBAL at byte 2"),
    ("a memo of a billion", b"\x80\x02}r\x00\x00\x00\x40.", "has LONG_BINPUT at byte 3"),
    ("a string of 4 GB", b"\x80\x02X\xff\xff\xff\xff.", "truncated pickle"),
    ("cut pickle", pickle.dumps(_DUMP, 2)[:-40], "is a broken or truncated pickle"),
    ("two dumps", pickle.dumps(_DUMP, 2) * 2, "data after its end"),
    ("cut JSON", as_bytes(_DUMP, as_json=True)[:-40], "is not JSON, or is truncated"),
    ("deep JSON", b'{"entries": ' + b"[" * 200_000, "nested too deeply"),
    ("deep pickle", _nested(200_000), "expected a dump as a dict"),
    ("no version", pickle.dumps({"entries": []}, 2), "version None"),
    ("no entries", pickle.dumps({"version": "2.4"}, 2), "has no entries"),
    ("sizes of strings", pickle.dumps({**_DUMP, "entries": [{**_ENTRY, "input_sizes": ["ab"]}]}, 2), "entry 0"),
    ("a sequence number", pickle.dumps({**_DUMP, "entries": [{**_ENTRY, "collective_seq_id": "x"}]}, 2), "entry 0"),
    ("a state", pickle.dumps({**_DUMP, "entries": [{**_ENTRY, "state": "lost"}]}, 2), "entry 0"),
    ("dtypes", pickle.dumps({**_DUMP, "entries": [{**_ENTRY, "input_dtypes": []}]}, 2), "sizes and dtypes differ"),
    ("a frame", pickle.dumps({**_DUMP, "entries": [{**_ENTRY, "frames": [{"line": 1}]}]}, 2), "entry 0"),
    ("shared lists", pickle.dumps({**_DUMP, "entries": [{**_ENTRY, "frames": [_FRAME] * 99}] * 99}, 2), "the file has"),
    ("dimensions", pickle.dumps({**_DUMP, "entries": [{**_ENTRY, "input_sizes": [[1] * 99]}]}, 2), "64 dimensions"),
    ("groups", pickle.dumps({**_DUMP, "pg_config": {"0": {"ranks": "__import__('os')"}}}, 2), "expected ranks"),
    ("another rank's", pickle.dumps(held_up_elsewhere().dump(2), 2), "of which 0 is not a member"),
    ("another job's", pickle.dumps(Job(2).dump(0), 2), "of different jobs, of 2 and 4 ranks"),
    ("too many ranks", pickle.dumps({**_DUMP, "pg_config": {}, "entries": []}, 2), "but the job had 4 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "error"), [each[1:] for each in _BROKEN], ids=[each[0] for each in _BROKEN])
def test_what_is_no_dump(raw: bytes, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = late().write(tmp_path)[1:]
    bad = tmp_path / ("dump_9" if "but the job" in error else "dump_0")
    bad.write_bytes(raw)
    assert exit_code("explain", str(bad), *map(str, good)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("aiodist: error: ")
    assert error in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_names_that_tell_no_rank_or_the_same(tmp_path: Path) -> None:
    (tmp_path / "dump").write_bytes(b"")
    with pytest.raises(DumpError, match="the name must end in the rank"):
        read(tmp_path / "dump")
    with pytest.raises(DumpError, match="no file whose name ends in a rank"):
        read_all([tmp_path])
    files = [*late().write(tmp_path), *late().write(tmp_path, as_json=True)]
    with pytest.raises(DumpError, match="are both of rank 0"):
        read_all(files)


def test_any_corruption_is_a_clean_error_or_read(tmp_path: Path) -> None:
    """Bytes are flipped, cut and put in; the result is a report, or an error of ours."""
    chance, file = random.Random(0), tmp_path / "0"
    for raw in (as_bytes(skipped().dump(0)), as_bytes(skipped().dump(0), as_json=True)):
        for _ in range(300):
            broken, at = bytearray(raw), chance.randrange(len(raw))
            broken[at : at + chance.choice([0, 1, 1, 9])] = chance.randbytes(chance.choice([0, 1, 1, 4]))
            file.write_bytes(broken)
            try:
                str(explain(read_all([file])))
            except DumpError as error:
                assert str(file) in str(error) or "job" in str(error)  # noqa: PT017


def test_files_that_source_lines_must_not_be_read_from(tmp_path: Path) -> None:
    job = Job(2)
    job.call(0, "barrier", frames=[{"name": "f", "filename": "/dev/zero", "line": 1}])
    assert "/dev/zero" not in str(said_of(job, tmp_path))
