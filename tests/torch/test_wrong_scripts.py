"""Wrong scripts of torch.distributed are reported with the ranks and lines that differ; schedules, and other ends."""

from __future__ import annotations

import re
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from aiodist._checking.schedule import Schedule
from tests.project.paths import ROOT
from tests.torch.conftest import Run

WRONG: dict[str, tuple[str, str, list[int], list[str]]] = {
    "kind": ("if rank == 1:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(2))",
             "kind", [1], ["py:5", "py:7"]),
    "reduce op": ("dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)",
                  "reduce_op", [2], ["py:4"]),
    "root": ("dist.broadcast(torch.ones(2), src=rank // 2)", "source", [2], ["py:4"]),
    "shape": ("dist.all_reduce(torch.ones(2 + (rank == 0)))", "shape", [0], ["py:4"]),
    "dtype": ("dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank == 0 else None))", "dtype", [0], ["py:4"]),
    "early exit": ("if rank == 1:\n    sys.exit()\ndist.barrier()", "exited", [1], ["py:6"]),
    "uneven loops": ("for _ in range(3 + (rank == 0)):\n    dist.all_reduce(torch.ones(2))", "exited", [0], ["py:5"]),
    "asynchronous and never waited for": ("if rank == 0:\n    dist.all_reduce(torch.ones(2), async_op=True)",
                                          "exited", [0], ["py:5"]),
    "equal calls in another order": ("""
def one():
    dist.all_reduce(torch.ones(2))
def two():
    dist.all_reduce(torch.zeros(2))
for call in [one, two] if rank != 1 else [two, one]:
    call()
""", "call_site", [1], ["py:6", "py:8", "collective #1", "the same two calls in opposite order"]),
    "equal calls in another order, in branches of their own": ("""
x, y = torch.ones(2), torch.zeros(2)
if rank == 1:
    dist.all_reduce(y)
    dist.all_reduce(
        x
    )
else:
    dist.all_reduce(
        x
    )
    dist.all_reduce(y)
""", "call_site", [1], ["py:7", "py:12", "collective #1", "Make the calls in the same order"]),
    "equal calls in another order, through a helper": ("""
def total(value):
    dist.all_reduce(value)
def loss():
    total(torch.ones(2))
def accuracy():
    total(torch.ones(2))
if rank == 1:
    accuracy(), loss()
else:
    loss(), accuracy()
""", "call_site", [1], ["py:8", "py:10", "callers differ", "Make the calls in the same order"]),
    "a last batch that is smaller": ("""
parts = [torch.ones(4) for _ in range(size)]
dist.all_gather(parts, torch.ones(4 - (rank == 2)))
""", "shape", [2], ["py:6", "Was it a last, smaller batch?"]),
    "caught": ("try:\n    dist.all_reduce(torch.ones(2 + (rank == 0)))\nexcept RuntimeError:\n    pass",
               "shape", [0], ["py:5"]),
    "nobody receives": ("if rank == 0:\n    dist.isend(torch.ones(2), 1)", "unmatched", [0, 1], ["py:5"]),
    "both send first": ("if rank < 2:\n    dist.send(torch.ones(2), 1 - rank)\n    dist.recv(torch.ones(2), 1 - rank)",
                        "cycle", [0, 1], ["py:5"]),
    "message shape": ("if rank == 0:\n    dist.send(torch.ones(2), 1)\nif rank == 1:\n    dist.recv(torch.ones(3), 0)",
              "shape", [0, 1], ["py:5", "py:7"]),
    "tag": ("x = torch.ones(2)\nif rank == 0:\n    dist.send(x, 1, tag=5)\nif rank == 1:\n    dist.recv(x, 0, tag=6)",
            "cycle", [0, 1], ["group 'messages 0->1 tag 6'", "same size and tag"]),
    "store": ("if rank == 0:\n    dist.distributed_c10d._get_default_store().get('never')", "deadlock", [0],
              ["py:5", "never"]),
    "in a group": ("""
g = dist.new_group([0, 2])
if rank == 0:
    dist.barrier(g)
if rank == 2:
    dist.all_reduce(torch.ones(2), group=g)
""", "kind", [0, 2], ["py:7", "py:9"]),
    "a group that is made by its members alone": ("""
if rank != 2:
    dist.new_group([0, 1])
both = dist.new_group([0, 1, 2])
dist.barrier(both)
""", "group", [2], ["disagree at collective #0 of group 'new_group'", "new_group([0, 1])", "py:6",
      "new_group([0, 1, 2])", "py:7"]),
    "a group that a member does not make": (
        "if rank == 1:\n    dist.new_group([0, 1])",
        "group", [1], ["ranks 0 and 2 ended without collective #0 of group 'new_group'", "Every rank must call"]),
    "one call in two groups": (
        "group = dist.new_group([0, 1, 2])\ndist.barrier(group=group if rank else None)",
        "cycle", [0], ["the same call in different contexts: ranks 1 and 2 in that of group '1'", "each in the same"]),
    "groups crossed": ("""
a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
if rank < 2:
    for group in [b, a] if rank else [a, b]:
        dist.barrier(group)
""", "cycle", [0, 1], ["py:8"]),
}  # fmt: skip


@pytest.mark.parametrize(("script", "reason", "suspects", "lines"), WRONG.values(), ids=WRONG)
def test_wrong_scripts_are_reported(script: str, reason: str, suspects: list[int], lines: list[str], run: Run) -> None:
    outcome = run(script)
    assert outcome.kind == "disagreed", outcome.text
    report: dict[str, Any] = outcome.report
    assert (report["reason"], report["suspects"]) == (reason, suspects), outcome.text
    assert all(line in outcome.text for line in lines), outcome.text


OTHERWISE: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "values that ranks cannot exchange": (
        "dist.all_to_all_single(torch.zeros(3), torch.ones(3), [1, 1, 1], [1, 1, 1] if rank else [2, 1, 0])", {},
        "failed", ["all_to_all: rank 0 of the group is sent, as part 0, [2], but expects [1]", "ranks 0-2 of 3"]),
    "a thread of a rank": (
        "import threading\nthread = threading.Thread(target=dist.barrier)\nthread.start()\nthread.join()", {},
        "failed", ["only a rank's own thread can"]),
    "an exception of one rank comes first, and then who waits": (
        "if rank == 1:\n    raise ValueError('bad data')\ndist.barrier()", {},
        "failed", ["ValueError: bad data", "rank 1 of 3", "barrier()"]),
    "an exit code": ("sys.exit(3 * (rank == 2))", {}, "exited", ["exit code 3", "rank 2 of 3"]),
    "a crash inside torch": (
        "dist.barrier()\nif rank == 1:\n    import ctypes\n    ctypes.string_at(0)\ndist.barrier()", {},
        "crashed", ["SIGSEGV"]),
    "a script that takes too long": (
        "while rank == 1: pass\ndist.barrier()", {"seconds": 0.3}, "timeout", ["> rank 1  at", "script.py:4"]),
    "remote procedures": (
        "from torch.distributed import rpc\nrpc.init_rpc(str(rank), rank=rank, world_size=size)", {},
        "failed", ["init_rpc", "NotImplementedError: aiodist check cannot run torch.distributed.rpc"]),
    "several ranks in a profiler": (
        "from torch.profiler import profile\nwith profile():\n    dist.barrier()", {},
        "failed", ["NotImplementedError: aiodist check cannot profile several ranks"]),
    "CUDA without --cpu": (
        "torch.ones(1).cuda()", {}, "failed", ["With --cpu, CUDA devices are taken for the CPU."]),
    "a reduce op that cannot be carried out": (
        "dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))", {},
        "failed", ["NotImplementedError: aiodist check cannot carry out ReduceOp.PREMUL_SUM"]),
}  # fmt: skip


@pytest.mark.parametrize(("script", "how", "kind", "texts"), OTHERWISE.values(), ids=OTHERWISE)
def test_other_ends_are_reported(script: str, how: dict[str, Any], kind: str, texts: list[str], run: Run) -> None:
    outcome = run(script, **how)
    assert outcome.kind == kind
    assert re.search(".*".join(map(re.escape, texts)), outcome.text, re.DOTALL), outcome.text  # in this order
    assert outcome.text.count(texts[0]) == 1
    assert "aiodist/" not in outcome.text


_IN_ORDER = """
dist.barrier()
order = torch.__dict__.setdefault("order", [])  # ranks share torch
order.append(rank)
dist.barrier()
if rank == 0 and sys.argv[1:]:
    open(sys.argv[1], "w").write(str(order))
if (rank, order[0]) != (1, 2):
    dist.barrier()
"""


def test_a_schedule_is_replayed(run: Run, tmp_path: Path) -> None:
    orders = []
    for number, text in enumerate(("0/", "0/0:-1,4:1", "3/5-")):
        outcome = run(_IN_ORDER, 4, str(tmp_path / f"{number}"), replay=Schedule.parse(text))
        assert outcome.schedule == text
        orders.append((tmp_path / f"{number}").read_text())
    assert len(set(orders)) == 3


def test_a_failing_schedule_is_reduced_to_few_changes(checked: Run) -> None:
    found = checked(_IN_ORDER, schedules=9)
    changes = Schedule.parse(found.outcome.schedule).changes
    assert (found.outcome.kind, len(changes)) == ("disagreed", 1)
    assert f"schedule {found.schedules}, with 1 change to the default order, in which nothing fails." in found.text
    again = checked(_IN_ORDER, replay=Schedule(0, changes))
    assert again.outcome.report == found.outcome.report


def test_pages_show_what_is_said_of_their_example(server: Connection) -> None:
    script = "docs/examples/ddp_that_hangs.py"
    server.send(({"script": script, "ranks": 3}, 1))
    said = server.recv().text
    for page in ("README.md", "docs/torch.md"):
        shown = (ROOT / page).read_text().partition(f"$ aiodist check --ranks 3 {script}\n")[2].partition("...\n```")[0]
        assert shown.count("\n") > 5
        assert said.startswith(shown)


def test_cuda_devices_are_taken_for_the_cpu_where_that_is_asked_for(run: Run) -> None:
    script = """
import os, torch, torch.distributed as dist

def work(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://localhost:1234", rank=rank, world_size=size)
    model = torch.nn.Linear(2, 2).to(rank)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    model(torch.ones(1, 2, device=f"cuda:{rank}").cuda()).sum().backward()
    total = torch.ones(1, device=torch.device("cuda", rank))
    dist.all_reduce(total)
    assert total.item() == size == torch.cuda.device_count() and dist.get_backend() == "nccl"

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
"""
    outcome = run(script, 2, prologue="", cpu=True)
    assert outcome.kind == "agreed", outcome.text
    assert (
        "CUDA devices were taken for the CPU in DistributedDataParallel (device_ids), Tensor.cuda" in outcome.notes[0]
    )
