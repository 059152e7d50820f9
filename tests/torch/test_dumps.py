"""`aiodist explain`: reports on jobs from their dumps, and errors about files that are not dumps, without torch."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from aiodist._torch.dumps import DumpError, read_all
from aiodist._torch.explain import Explanation, explain
from tests.project.paths import ROOT
from tests.tools.command import exit_code
from tests.torch.recorded import Job, as_bytes


def explained(job: Job, folder: Path, *, without: tuple[int, ...] = (), as_json: bool = False) -> Explanation:
    return explain(read_all(job.write(folder, without=without, as_json=as_json)))


# Jobs: each with the headline of its report, the suspects, and what else the text must say.


def agreeing() -> Job:
    """NCCL counts elements; places may differ, and so may sizes in an all_to_all."""
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
    return with_last(job, 1, output_sizes=[[3], [3]])


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


def with_last(job: Job, *ranks: int, **fields: Any) -> Job:
    """Change the last calls of some ranks."""
    for rank in ranks:
        job.entries[rank][-1].update(fields)
    return job


def issued_as_one(size: int) -> Job:
    """Messages and collectives that were issued as one; only their ends say that they have ended."""
    job = Job(2)
    for rank, message in enumerate(("send 0->1", "recv 1<-0")):
        with job.as_one(rank, state="completed", is_p2p=True):
            job.call(rank, message, [3])
        with job.as_one(rank):
            job.call(rank, "all_reduce", [3])
            job.call(rank, "all_gather", [3 if rank else size])
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
        ["The latest call of rank 2 is all_reduce(float32[3]) at /job/train.py:5."]),
    "ended in an error": (
        with_last(late(), 0, 1, 3, state="completed"),
        "collective #1 cannot be completed: rank 2 has not arrived, ranks 0, 1 and 3 wait in it", (2,), []),
    "other size": (
        Job(4).calls("!2: all_reduce [3]\n2: all_reduce [4]"),
        "ranks disagree at collective #0", (2,), ["all_reduce(float32[4])", "values are not broadcast"]),
    "other dtype": (
        with_last(Job(4).calls("*: all_reduce [3]"), 2, input_dtypes=["Half"]),
        "ranks disagree at collective #0", (2,), ["all_reduce(float16[3])", "Values are never cast"]),
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
        ["recv(float32[3], src=2)", "The latest call of rank 2 is all_reduce(float32[3])"]),
    "receive in a ring": (
        Job(3).calls("0: recv 0<-2 [3]\n1: recv 1<-0 [3]\n2: recv 2<-1 [3]"),
        "ranks 0-2 wait for each other", (0, 1, 2), ["of group 'messages 1->2'"]),
    "other size of a message": (
        Job(2).calls("0: send 0->1 [3]\n1: recv 1<-0 [4]"),
        "ranks disagree at collective #0 of group 'messages 0->1'", (0, 1), ["batch_isend_irecv"]),
    "issued as one": (issued_as_one(3), "no rank waits", (), []),
    "issued as one, with other sizes": (
        issued_as_one(4), "ranks disagree at collective #0", (0, 1),
        ["The shape differs at value[1]: float32[4] on rank 0"]),
    "dropped calls, on rank 3 more than on others": (
        Job(4, capacity=5).calls("*: all_reduce [3]\n" * 20 + "3: all_reduce [3]"),
        "collective #20 cannot be completed: ranks 0-2 have not arrived, rank 3 waits in it", (0, 1, 2),
        ["Older calls of ranks 0-3 have been dropped"]),
    "group of gloo": (
        Job(4, {"1": ("", [0, 1])}, backend="gloo").calls("*: barrier\n1: all_reduce [3] of 1"),
        "collective #0 of group '1' of rank 1 cannot be completed: all have arrived, but their values have not", (1,),
        ["the ranks that called count as members"]),
    "many ranks": (
        Job(200).calls("!70: barrier at 3"), "collective #0 cannot be completed: rank 70 has not arrived", (70,),
        ["ranks 0-69 and 71-199 199 ranks barrier()", "> rank 70 nccl_trace_rank_70 elsewhere, after 0 collectives",
         "No call of rank 70 is recorded."]),
}  # fmt: skip


@pytest.mark.parametrize(("job", "headline", "suspects", "texts"), _JOBS.values(), ids=_JOBS)
def test_job_is_explained(job: Job, headline: str, suspects: tuple[int, ...], texts: list[str], tmp_path: Path) -> None:
    found = explained(job, tmp_path)
    said = " ".join(found.text.split())
    assert said.startswith(headline)
    assert (found.report.suspects if found.report is not None else ()) == suspects
    assert [text for text in texts if " ".join(text.split()) not in said] == []
    assert "replica" not in found.text
    assert "ctx." not in found.text
    assert len(found.text.splitlines()) < 30
    assert max(map(len, found.text.splitlines())) <= 100
    assert json.loads(json.dumps(found.to_dict()))["text"] == found.text


def test_json_dumps_give_the_same_report_without_lines(tmp_path: Path) -> None:
    found = explained(skipped(), tmp_path, as_json=True)
    assert "rank 1 skipped broadcast at an unknown line, which ranks 0, 2 and 3 made as #7" in " ".join(
        found.text.split()
    )
    assert "JSON dumps do not contain the lines of the program; pickled ones do." in found.notes
    both = explain(read_all([tmp_path / "0.json", *skipped().write(tmp_path)[1:]]))
    assert both.report is not None
    assert both.report.suspects == (1,)


def test_ranks_without_a_dump_are_named_and_not_blamed(tmp_path: Path) -> None:
    found = explained(late(), tmp_path, without=(2,))
    assert found.text.startswith(
        "collective #1 cannot be completed: ranks 0, 1 and 3 wait in it, and nothing is known of rank 2"
    )
    assert "There is no dump of rank 2." in found.notes
    assert "\n> ranks 0 and 2  no dump " in explained(late(), tmp_path, without=(0, 2)).text
    unmatched = explained(never_sent(), tmp_path, without=(2,)).text
    assert "waits in recv(float32[3], src=2), and nothing is known of rank 2" in unmatched


def test_page_shows_the_report_on_its_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are those that PyTorch 2.13 records on gloo; DDP reduces from C++, inside `backward`."""
    torch = "/venv/lib/python3.13/site-packages/torch"
    backward_frames = [
        {"name": "_engine_run_backward", "filename": f"{torch}/autograd/graph.py", "line": 979},
        {"name": "backward", "filename": f"{torch}/_tensor.py", "line": 623},
    ]
    script = "docs/examples/ddp_that_hangs.py"
    lines = (ROOT / script).read_text().splitlines()
    model, forward, backward, barrier = (
        next(number for number, line in enumerate(lines, 1) if what in line)
        for what in ("DistributedDataParallel(", "mse_loss(", "loss.backward()", "dist.barrier()")
    )
    job = Job(3, backend="gloo").calls(
        f"*: all_gather [1] at {model}\n*: broadcast [6] at {model}\n*: broadcast [17] at {model}\n"
        f"*: all_reduce [17] at {backward}\n*: broadcast [3] at {forward}\n*: broadcast [1] at {forward}\n"
        + f"*: all_reduce [17] at {backward}\n" * 4
        + f"!1: all_reduce [17] at {backward}\n1: barrier at {barrier}"
    )
    for rank, entries in enumerate(job.entries):
        for entry in entries:
            own = {"name": "train", "filename": script, "line": entry["frames"][-1]["line"]}
            entry["frames"] = [*backward_frames * (own["line"] == backward), own]
        (tmp_path / f"dump_{rank}").write_bytes(as_bytes(job.dump(rank)))
    monkeypatch.chdir(ROOT)
    shown = (ROOT / "docs" / "torch.md").read_text().partition("$ aiodist explain dump_*\n")[2].partition("```")[0]
    assert explain(read_all(sorted(tmp_path.iterdir()))).text + "\n" == shown


# Files.


def test_exit_code_says_whether_ranks_disagree_or_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job, code in ((agreeing(), 0), (late(), 1)):
        assert exit_code("explain", *map(str, job.write(tmp_path))) == code
    assert exit_code("explain", "--json", *map(str, job.write(tmp_path))) == 1
    said = capsys.readouterr().out
    assert json.loads(said[said.index("\n{") :])["report"]["suspects"] == [2]


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("run",)


_DUMP = late().dump(0)


def _with(entries: int = 1, **fields: Any) -> bytes:
    return pickle.dumps({**_DUMP, "entries": [{**_DUMP["entries"][0], **fields}] * entries}, 2)


_BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a dump"),
    "text": (b"Traceback (most recent call last):", "has b'Trace"),
    "function": (pickle.dumps({"entries": _Runs()}, 2), "only plain containers"),
    "a memo of a billion": (b"\x80\x02}r\x00\x00\x00\x40.", "at byte 3"),
    "a string of 4 GB": (b"\x80\x02X\xff\xff\xff\xff.", "truncated"),
    "cut pickle": (pickle.dumps(_DUMP, 2)[:-40], "truncated"),
    "cut JSON": (as_bytes(_DUMP, as_json=True)[:-40], "truncated"),
    "deep JSON": (b'{"entries": ' + b"[" * 200_000, "recursion"),
    "deep pickle": (b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "got version None"),
    "no entries": (pickle.dumps({"version": "2.4", "pg_config": {}}, 2), "the list of entries is malformed"),
    "sizes of strings": (_with(input_sizes=["ab"]), "entry 0"),
    "a sequence number": (_with(collective_seq_id="x"), "entry 0"),
    "dtypes": (_with(input_dtypes=[]), "sizes and dtypes differ"),
    "a frame": (_with(frames=[{"line": 1}]), "entry 0"),
    "groups": (pickle.dumps({**_DUMP, "pg_config": {"0": {"ranks": "__import__('os')"}}}, 2), "pg_config"),
    "another rank's": (pickle.dumps(held_up_elsewhere().dump(2), 2), "of which 0 is not a member"),
    "a second group of all ranks": (
        pickle.dumps(Job(4, {"1": ("default_pg", [0, 1, 2, 3])}).calls("0: send 0->1 [3] of 1").dump(0), 2),
        "not in its process group",
    ),
    "another job's": (pickle.dumps(Job(2).dump(0), 2), "of different jobs, of 2 and 4 ranks"),
}


@pytest.mark.parametrize(("raw", "error"), _BROKEN.values(), ids=_BROKEN)
def test_file_that_is_not_a_dump_is_one_line_of_error(
    raw: bytes, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = late().write(tmp_path)[1:]
    bad = tmp_path / "dump_0"
    bad.write_bytes(raw)
    assert exit_code("explain", str(bad), *map(str, good)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("aiodist: error: ")
    assert error in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_file_without_a_rank_of_its_own_is_refused(tmp_path: Path) -> None:
    files = [*late().write(tmp_path), *late().write(tmp_path, as_json=True)]
    for paths, error in (
        ([tmp_path / "dump"], "no such file; the name must end in the rank"),
        ([Path(__file__).parent], "this is a folder"),
        ([tmp_path / "dump_5"], "No such file"),
        (files, "are both of rank 0"),
    ):
        with pytest.raises(DumpError, match=error):
            read_all(paths)


def test_corrupted_file_is_refused_or_read(tmp_path: Path) -> None:
    """Bytes are replaced, removed and inserted; the result is a report or a `DumpError`."""
    chance, file = random.Random(0), tmp_path / "0"
    for raw in (as_bytes(skipped().dump(0)), as_bytes(skipped().dump(0), as_json=True)):
        for _ in range(300):
            broken, at = bytearray(raw), chance.randrange(len(raw))
            broken[at : at + chance.choice([0, 1, 1, 9])] = chance.randbytes(chance.choice([0, 1, 1, 4]))
            file.write_bytes(broken)
            try:
                explain(read_all([file]))
            except DumpError as error:
                assert str(file) in str(error) or "job" in str(error)  # noqa: PT017


def test_source_lines_are_not_read_from_devices(tmp_path: Path) -> None:
    job = Job(2)
    job.call(0, "barrier", frames=[{"name": "f", "filename": "/dev/zero", "line": 1}])
    assert "/dev/zero" not in explained(job, tmp_path).text
