"""`aiodist check --ranks`: right scripts run, wrong ones are reported; schedules, and other ends of a script.

A process with torch serves all tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from aiodist._checking.schedule import Schedule
from tests.project.paths import ROOT
from tests.tools.command import environment, run_command

if TYPE_CHECKING:
    from aiodist._torch.script import Checked

Check: TypeAlias = Callable[..., Any]

PROLOGUE = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""


def _serve(connection: Connection) -> None:
    os.chdir(ROOT)
    import_module("torch._dynamo")  # once, not in every fork
    from aiodist._torch.script import Request, check

    while True:
        fields, schedules = connection.recv()
        connection.send(check(Request(**fields), schedules))


@pytest.fixture(scope="module")
def server() -> Iterator[Connection]:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed (the extra torch)")
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,))
    process.start()
    there.close()
    yield here
    process.kill()
    process.join()


@pytest.fixture
def check(server: Connection, tmp_path: Path) -> Check:
    """Check a script, whose first lines set `rank` and `size`."""

    def check(
        script: str, ranks: int = 3, *arguments: str, prologue: str = PROLOGUE, schedules: int = 1, **more: Any
    ) -> Checked:
        file = tmp_path / "script.py"
        file.write_text(prologue + dedent(script))
        server.send(({"script": str(file), "arguments": arguments, "ranks": ranks, "seconds": 20.0, **more}, schedules))
        found: Checked = server.recv()
        return found

    return check


RIGHT = {
    "reduce ops": """
        for op, expected in (("SUM", 6), ("PRODUCT", 6), ("MIN", 1), ("MAX", 3), ("BAND", 0), ("BOR", 3), ("BXOR", 0)):
            x = torch.full((2,), rank + 1)
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            assert x.tolist() == [expected] * 2, op
        x = torch.full((2,), rank + 1.0)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert x.tolist() == [2.0] * 2
        x = torch.sparse_coo_tensor([[rank, 4]], [1.0, 2.0], (5,))
        dist.all_reduce(x)
        assert x.to_dense().tolist() == [1, 1, 1, 0, 6]
    """,
    "gathering": """
        parts = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank)))
        assert torch.stack(parts).tolist() == [[0, 0], [1, 1], [2, 2]]
        whole = torch.zeros(size * 2)
        whole[rank * 2 : rank * 2 + 2] = rank
        dist.all_gather_into_tensor(whole, whole[rank * 2 : rank * 2 + 2])
        assert whole.tolist() == [0, 0, 1, 1, 2, 2]
        parts = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
        dist.gather(torch.full((2,), float(rank)), parts, dst=1)
        assert parts is None or torch.stack(parts).tolist() == [[0, 0], [1, 1], [2, 2]]
        if hasattr(dist, "gather_single"):  # of torch 2.15
            whole = torch.zeros(size * 2) if rank == 1 else None
            dist.gather_single(torch.full((2,), float(rank)), whole, dst=1)
            assert whole is None or whole.tolist() == [0, 0, 1, 1, 2, 2]
        uneven = [torch.zeros(n + 1) for n in range(size)]
        dist.all_gather(uneven, torch.ones(rank + 1))
        assert [part.tolist() for part in uneven] == [[1], [1, 1], [1, 1, 1]]
    """,
    "scattering": """
        own = torch.zeros(2)
        dist.scatter(own, [torch.full((2,), float(n)) for n in range(size)] if rank == 2 else None, src=2)
        assert own.tolist() == [rank, rank]
        dist.reduce_scatter(own, [torch.full((2,), float(n)) for n in range(size)])
        assert own.tolist() == [rank * size] * 2
        dist.reduce_scatter_tensor(own, torch.arange(float(size * 2)))
        assert own.tolist() == [rank * 2 * size, (rank * 2 + 1) * size]
        x = torch.full((2,), float(rank))
        dist.reduce(x, dst=0)
        assert x.tolist() == ([3, 3] if rank == 0 else [rank, rank])
    """,
    "all to all": """
        own = torch.zeros(size)
        dist.all_to_all_single(own, torch.arange(float(size)) + 10 * rank)
        assert own.tolist() == [rank, 10 + rank, 20 + rank]
        own = torch.zeros(size * (rank + 1), 2)
        dist.all_to_all_single(own, torch.full((6, 2), float(rank)), [rank + 1] * size, [1, 2, 3])
        assert own[:, 0].tolist() == [float(n) for n in range(size) for _ in range(rank + 1)]
        parts = [torch.zeros(1) for _ in range(size)]
        dist.all_to_all(parts, [torch.tensor([float(10 * rank + n)]) for n in range(size)])
        assert torch.cat(parts).tolist() == [rank, 10 + rank, 20 + rank]
        sizes = [[1, 1, 1], [1, 2, 3], [1, 3, 2]]  # only rank 0 has parts of one size
        parts = [torch.zeros(row[rank]) for row in sizes]
        dist.all_to_all(parts, [torch.full((n,), float(rank)) for n in sizes[rank]])
        assert torch.cat(parts).tolist() == [float(n) for n in range(size) for _ in range(sizes[n][rank])]
        given = (sizes[rank], sizes[rank]) if rank else (None, None)
        dist.all_to_all_single(torch.zeros(sum(sizes[rank])), torch.ones(sum(sizes[rank])), *given)
    """,
    "messages": """
        x = torch.full((2,), float(rank))
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 2)
            assert x.tolist() == [2, 2]
        elif rank == 1:
            assert dist.recv(x, 0) == 0 and x.tolist() == [0, 0]
        else:
            dist.send(x, 0, tag=0)
        y = torch.zeros(1)
        ops = [dist.P2POp(dist.isend, torch.ones(1) * rank, (rank + 1) % size),
               dist.P2POp(dist.irecv, y, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert y.item() == (rank - 1) % size
        if rank == 0:
            dist.send(torch.arange(4.0), 1)
            dist.send(torch.tensor(5.0), 1)
        if rank == 1:
            square, one = torch.zeros(2, 2), torch.zeros(1)
            dist.recv(square, 0)  # elements count
            dist.recv(one, 0)
            assert square.tolist() == [[0, 1], [2, 3]] and one.item() == 5
    """,
    "asynchronous": """
        x, y = torch.ones(2), torch.ones(2)
        works = [dist.all_reduce(t, async_op=True) for t in (x, y)]
        for work in works[::-1]:
            work.wait()
        assert x.sum() == y.sum() == 6 and works[0].is_completed()
        doubled = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
        assert doubled.wait().tolist() == [6, 6]
    """,
    "the default store, and os._exit": """
        store = dist.distributed_c10d._get_default_store()
        first = store.compare_set("first", "", str(rank))
        assert store.num_keys() and not store.delete_key("absent")
        firsts = [None] * size
        dist.all_gather_object(firsts, first)
        assert len({*firsts}) == 1 and firsts[0] in (b"0", b"1", b"2")
        os._exit(0)
    """,
    "files and ports as stores": """
        for store in (dist.FileStore(__file__ + ".store", size), dist.TCPStore("localhost", 1, size, rank == 0)):
            store.set(f"from {rank}", str(rank))
            assert store.get(f"from {(rank + 1) % size}") == str((rank + 1) % size).encode()
    """,
    "a process per rank": """
        import torch.multiprocessing as mp
        def work(name, rank):
            dist.init_process_group("gloo", rank=rank, world_size=size)
            x = torch.ones(1)
            dist.all_reduce(x)
            dist.distributed_c10d._get_default_store().set(f"{name} {rank}", str(x.item()))
            sys.exit()
        dist.destroy_process_group()
        mp.set_start_method("spawn")
        for name in ("one", "two"):
            processes = [mp.Process(target=work, args=(name,), kwargs={"rank": number}) for number in range(size)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            assert [process.exitcode for process in processes] == [0] * size
        context = mp.spawn(lambda rank: work("three", rank), nprocs=size, join=False)
        while not context.join():
            pass
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        found = [store.get(f"{name} {number}") for name in ("one", "two", "three") for number in range(size)]
        assert found == [b"3.0"] * 3 * size
    """,
    "a profiler of one rank": """
        from torch.profiler import profile
        if rank == 1:
            with profile() as profiler:
                dist.all_reduce(torch.ones(2) + 1)
            assert profiler.key_averages()
        else:
            dist.all_reduce(torch.ones(2))
    """,
    "compiled": """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(torch.full((1, 2), float(rank))).sum().backward()
        assert model.module.weight.grad.eq(2).all()
        @torch.compile(backend="eager")
        def total(x):
            y = x * 2
            dist.all_reduce(y)
            return y + 1
        assert total(torch.ones(2)).tolist() == [7, 7]
    """,
    "a future taken before a message that others need": """
        if rank == 0:
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            for other in (1, 2):
                dist.send(torch.ones(1), other)
        else:
            dist.recv(torch.ones(1), 0)
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        future.wait()
        assert future.value()[0].item() == 3
    """,
    "groups": """
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 2])]
        for pair, members in zip(pairs, ([0, 2], [1, 2])):
            if rank in members:
                x = torch.full((1,), float(rank))
                dist.all_reduce(x, group=pair)
                assert x.item() == sum(members)
                dist.broadcast(x.fill_(rank), src=2, group=pair)
                assert x.item() == 2 and dist.get_rank(pair) == members.index(rank)
        assert dist.get_backend(pairs[0] if rank != 1 else None) == "gloo"
        only = dist.new_group([0, 1], use_local_synchronization=True)
        if rank < 2:
            dist.monitored_barrier(only)
    """,
    "functional": """
        import torch.distributed._functional_collectives as functional
        x = torch.full((2,), float(rank))
        assert (functional.all_reduce(x, "sum", dist.group.WORLD) + 0).tolist() == [3, 3]
        assert (functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0).tolist() == [0, 0, 1, 1, 2, 2]
        scattered = functional.reduce_scatter_tensor(torch.arange(3.0), "avg", 0, dist.group.WORLD) + 0
        assert scattered.tolist() == [rank]
        pair = functional.all_reduce_coalesced([x, x[:1]], "max", dist.group.WORLD)
        assert [(each + 0).tolist() for each in pair] == [[2, 2], [2]]
    """,
    "data parallel": """
        from torch.nn.parallel import DistributedDataParallel
        torch.manual_seed(rank)
        model = DistributedDataParallel(torch.nn.Linear(3, 2), bucket_cap_mb=0.00001)
        inner = model.module
        def gradient():
            found, inner.weight.grad = inner.weight.grad, None
            return found.clone()
        for _ in range(3):
            model(torch.full((1, 3), float(rank))).sum().backward()
            assert torch.equal(gradient(), torch.ones(2, 3))
        with model.no_sync():
            model(torch.full((1, 3), float(rank))).sum().backward()
        assert torch.equal(gradient(), torch.full((2, 3), float(rank)))
        with model.join():
            for _ in range(1 + rank):
                model(torch.ones(1, 3)).sum().backward()
        gradient()
        with model.join(divide_by_initial_world_size=False):
            for _ in range(2 if rank == 2 else 1):
                model(torch.ones(1, 3)).sum().backward()
        assert torch.equal(gradient(), torch.full((2, 3), 2.0 if rank == 2 else 1.0))
    """,
    "sharded": """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh["tensor"], [Shard(0)])
        assert x.to_local().shape == (2, 4) and (x @ x.T).full_tensor().sum().item() == 3680
        assert x.redistribute(mesh["tensor"], [Replicate()]).to_local().sum().item() == 120
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["data"])
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad.full_tensor().eq(2).all()
        from torch.distributed.tensor.parallel import loss_parallel
        scores = distribute_tensor(torch.eye(4, requires_grad=True), mesh["tensor"], [Shard(1)])
        with loss_parallel():
            torch.nn.functional.cross_entropy(scores, torch.arange(4)).backward()
            dist.barrier()
    """,
    "environment, arguments and random numbers of each rank": """
        assert os.environ["RANK"] == os.environ.copy()["LOCAL_RANK"] == str(rank) and "MASTER_ADDR" in os.environ
        assert os.environ["ROLE_RANK"] == str(rank) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        os.environ["MINE"] = str(rank)
        sys.argv.append(rank)
        torch.manual_seed(rank)
        first = torch.rand(2)
        dist.barrier()
        assert dict(os.environ)["MINE"] == str(rank) and sys.argv[1:] == ["own", rank]
        import subprocess
        assert subprocess.check_output("echo $MINE", shell=True).decode().strip() == str(rank)
        second = torch.rand(2)
        torch.manual_seed(rank)
        assert torch.equal(torch.rand(2), first) and torch.equal(torch.rand(2), second)
    """,
    "different places in an order that is no mistake": """
        x = torch.ones(2) * rank
        for root in [*range(size), *range(size)]:
            if rank == root:
                dist.broadcast(x, root)
            else:
                dist.broadcast(x, root)
        for step in range(2 * size):
            if rank == step % size:
                dist.all_reduce(x)
            else:
                dist.all_reduce(x)
            dist.barrier()
        def publish(value):
            dist.all_reduce(value)
        def receive():
            value = torch.zeros(2)
            dist.all_reduce(value)
        for _ in range(size):
            if rank == 0:
                publish(x)
                publish(x)
            else:
                receive()
                receive()
    """,
    "waiting for another rank without a collective": """
        import pathlib, threading, time
        watch = threading.Thread(target=time.sleep, args=[0.001])  # a thread that is no rank's own sleeps really
        watch.start()
        watch.join()
        done = pathlib.Path(__file__).with_name("done")
        if rank == size - 1:
            done.touch()
        while not done.exists():
            time.sleep(1000)
        import subprocess
        with torch.__dict__.setdefault("lock", threading.Lock()):  # as torch's compiler waits
            subprocess.run(["sleep", "0.01"], timeout=10)
    """,
    "a collective in a process that is no rank": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(1) as pool:
            try:
                pool.apply(dist.barrier)
            except RuntimeError as error:
                assert "used outside of the ranks" in str(error)
            else:
                raise AssertionError
    """,
    "a module with state of its process": """
        import keeper
        assert keeper.kept == []
        keeper.kept.append(rank)
        dist.barrier()
        assert keeper.kept == [rank]
        things = [None] * size
        dist.all_gather_object(things, keeper.Thing())
        assert all(type(thing) is keeper.Thing for thing in things)
        import sympy  # torch's own, and some versions of torch do not load it before a rank needs it
        dist.all_gather_object(things, id(sympy))
        assert len(set(things)) == 1
    """,
    "objects of the script's own classes": """
        class Thing:
            def __init__(self, number):
                self.number = number
        things = [None] * size
        dist.all_gather_object(things, Thing(rank))
        assert [type(thing) is Thing and thing.number for thing in things] == list(range(size))
        named = [Thing(7) if rank == 1 else None]
        dist.broadcast_object_list(named, src=1)
        assert named[0].number == 7
    """,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_script_runs(name: str, check: Check, tmp_path: Path) -> None:
    (tmp_path / "keeper.py").write_text(
        "import torch.distributed\nkept = []\nclass Thing: ...\ntorch.distributed.barrier()"
    )
    outcome = check(RIGHT[name], 4 if name == "sharded" else 3, "own").outcome
    assert outcome.kind == "agreed", outcome.text


WRONG: dict[str, tuple[str, str, list[int], list[str]]] = {
    "kind": ("if rank == 1:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(2))",
             "kind", [1], ["py:5", "py:7"]),
    "reduce op": ("dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)",
                  "reduce_op", [2], ["py:4"]),
    "root": ("dist.broadcast(torch.ones(2), src=rank // 2)", "source", [2], ["py:4"]),
    "shape": ("dist.all_reduce(torch.ones(2 + (rank == 0)))", "shape", [0], ["py:4"]),
    "dtype": ("dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank == 0 else None))", "dtype", [0], ["py:4"]),
    "with a backend that torch lacks": (
        "dist.destroy_process_group()\ndist.init_process_group('nccl')\ndist.all_reduce(torch.ones(2 + (rank == 0)))",
        "shape", [0], ["py:6"]),
    "early exit": ("if rank == 1:\n    sys.exit()\ndist.barrier()", "exited", [1], ["py:6"]),
    "uneven loops": ("for _ in range(3 + (rank == 0)):\n    dist.all_reduce(torch.ones(2))", "exited", [0], ["py:5"]),
    "asynchronous and never awaited": ("if rank == 0:\n    dist.all_reduce(torch.ones(2), async_op=True)",
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
    "equal calls in another order, on one line": ("""
x, y = torch.ones(2), torch.zeros(2)
if rank == 1:
    dist.all_reduce(y), dist.all_reduce(x)
else:
    dist.all_reduce(x), dist.all_reduce(y)
""", "call_site", [1], ["py:7", "py:9", "Make the calls in the same order"]),
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
    "polling": (
        "if rank:\n    work = dist.barrier(async_op=True)\n    while not work.is_completed():\n        pass",
        "exited", [0], ["py:5"]),
    "compiled": ("""
@torch.compile(backend="eager")
def total(x):
    dist.all_reduce(x)
    return x + 1
total(torch.ones(2 + (rank == 0)))
""", "shape", [0], ["script.py:5"]),
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
    "a group made by its members alone": ("""
if rank != 2:
    dist.new_group([0, 1])
both = dist.new_group([0, 1, 2])
dist.barrier(both)
""", "group", [2], ["disagree at collective #0 of group 'new_group'", "new_group([0, 1])", "py:6",
      "new_group([0, 1, 2])", "py:7"]),
    "a group not made by a member": (
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
def test_wrong_script_is_reported(
    script: str, reason: str, suspects: list[int], lines: list[str], check: Check
) -> None:
    outcome = check(script).outcome
    assert outcome.kind == "disagreed", outcome.text
    report: dict[str, Any] = outcome.report
    assert (report["reason"], report["suspects"]) == (reason, suspects), outcome.text
    assert all(line in outcome.text for line in lines), outcome.text


OTHERWISE: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "parts that do not fit": (
        "dist.all_to_all_single(torch.zeros(3), torch.ones(3), [1, 1, 1], [1, 1, 1] if rank else [2, 1, 0])", {},
        "failed", ["all_to_all: rank 0 of the group is sent [2] as part 0, but expects [1]", "ranks 0-2 of 3"]),
    "a thread that waits for other ranks": (
        "import threading\nthread = threading.Thread(target=dist.barrier)\nthread.start()\nthread.join()", {},
        "failed", ["only a rank's own thread can"]),
    "an exception of one rank": (
        "if rank == 1:\n    raise ValueError('bad data')\ndist.barrier()", {},
        "failed", ["ValueError: bad data", "rank 1 of 3", "barrier()"]),
    "an exception of one rank for which others wait in a loop": (
        "import time\nif rank == 1:\n    raise ValueError('bad data')\nwhile True:\n    time.sleep(1)", {},
        "failed", ["ValueError: bad data", "rank 1 of 3"]),
    "a list that is too short": (
        "dist.all_gather([torch.ones(2)] * (size - (rank == 1)), torch.ones(2))", {},
        "failed", ["expected a list of 3 tensors, one for each rank, got 2", "rank 1 of 3", "all_gather"]),
    "an exit with an object": ("sys.exit({'loss': 1.0})", {}, "exited", ["SystemExit: {'loss': 1.0}"]),
    "an exit code": ("sys.exit(3 * (rank == 2))", {}, "exited", ["exit code 3", "rank 2 of 3"]),
    "a crash inside torch": (
        "dist.barrier()\nif rank == 1:\n    import ctypes\n    ctypes.string_at(0)\ndist.barrier()", {},
        "crashed", ["SIGSEGV"]),
    "a script that takes too long": (
        "if rank == 0:\n    raise ValueError('bad data')\nwhile rank == 1: pass\ndist.barrier()", {"seconds": 3},
        "timeout", ["rank 0  has ended with ValueError: bad data", "> rank 1  at", "script.py:6"]),
    "RPC": (
        "from torch.distributed import rpc\nrpc.init_rpc(str(rank), rank=rank, world_size=size)", {},
        "failed", ["init_rpc", "NotImplementedError: aiodist check cannot run torch.distributed.rpc"]),
    "several ranks in a profiler": (
        "from torch.profiler import profile\nwith profile():\n    dist.barrier()", {},
        "failed", ["NotImplementedError: aiodist check cannot profile several ranks"]),
    "CUDA without --cpu": (
        "torch.ones(1).cuda()", {}, "failed", ["With --cpu, the CPU is used in place of CUDA devices."]),
    "a reduce op that cannot be carried out": (
        "dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))", {},
        "failed", ["NotImplementedError: aiodist check cannot carry out ReduceOp.PREMUL_SUM"]),
}  # fmt: skip


@pytest.mark.parametrize(("script", "how", "kind", "texts"), OTHERWISE.values(), ids=OTHERWISE)
def test_other_end_is_reported(script: str, how: dict[str, Any], kind: str, texts: list[str], check: Check) -> None:
    checked = check(script, **how)
    outcome = checked.outcome
    assert outcome.kind == kind
    assert (" --timeout 3 " in checked.command()) == ("seconds" in how)
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


def test_schedule_is_replayed(check: Check, tmp_path: Path) -> None:
    orders = []
    for number, text in enumerate(("0/", "0/0:-1,4:1", "3/5-")):
        checked = check(_IN_ORDER, 4, str(tmp_path / f"{number}"), replay=Schedule.parse(text))
        assert checked.outcome.schedule == text
        orders.append((tmp_path / f"{number}").read_text())
    assert len(set(orders)) == 3


def test_failing_schedule_is_reduced_to_one_change(check: Check) -> None:
    found = check(_IN_ORDER, schedules=9)
    changes = Schedule.parse(found.outcome.schedule).changes
    assert (found.outcome.kind, len(changes)) == ("disagreed", 1)
    assert f"schedule {found.schedules}, with 1 change to the default order, in which nothing fails." in found.text
    again = check(_IN_ORDER, replay=Schedule(0, changes))
    assert again.outcome.report == found.outcome.report


@pytest.mark.usefixtures("server")
def test_command_prints_the_report_and_writes_a_trace(tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "run.json"
    script.write_text(f"{PROLOGUE}dist.all_reduce(torch.ones(2 + (rank == 1)))")
    ended = run_command("check", "--ranks", "2", str(script), AIODIST_TRACE=str(trace))
    assert ended.returncode == 1
    assert "ranks disagree at collective #1" in ended.stdout
    assert "20 B" in run_command("trace", "show", str(trace)).stdout


@pytest.mark.usefixtures("server")
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_script_does_not_outlive_a_killed_command(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('begun', flush=True)\nwhile True: pass")
    command = [sys.executable, "-m", "aiodist", "check", "--ranks", "2", str(script)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.kill()
        process.stdout.read()  # which ends when no process can write any more


def test_pages_show_the_report_on_their_example(server: Connection) -> None:
    script = "docs/examples/ddp_that_hangs.py"
    server.send(({"script": script, "ranks": 3}, 1))
    said = server.recv().text
    for page in ("README.md", "docs/torch.md"):
        shown = (ROOT / page).read_text().partition(f"$ aiodist check --ranks 3 {script}\n")[2].partition("...\n```")[0]
        assert shown.count("\n") > 5
        assert said.startswith(shown)


def test_cpu_is_used_in_place_of_cuda_devices_on_request(check: Check) -> None:
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
    outcome = check(script, 2, prologue="", cpu=True).outcome
    assert outcome.kind == "agreed", outcome.text
    assert "in place of CUDA devices in DistributedDataParallel (device_ids), Tensor.cuda" in outcome.notes[0]
