"""Right scripts of torch.distributed: what their collectives give, and what each rank has for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch.conftest import Run

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
    "the first in a store, and ranks that leave without an end": """
        first = dist.distributed_c10d._get_default_store().compare_set("first", "", str(rank))
        firsts = [None] * size
        dist.all_gather_object(firsts, first)
        assert len({*firsts}) == 1 and firsts[0] in (b"0", b"1", b"2")
        os._exit(0)
    """,
    "stores that ranks share": """
        for store in (dist.FileStore(__file__ + ".store", size), dist.TCPStore("localhost", 1, size, rank == 0)):
            store.set(f"from {rank}", str(rank))
            assert store.get(f"from {(rank + 1) % size}") == str((rank + 1) % size).encode()
    """,
    "processes, each of which is to be a rank": """
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
    "a future that is taken before a message that others need first": """
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
    """,
    "each rank has its own process": """
        assert os.environ["RANK"] == os.environ.copy()["LOCAL_RANK"] == str(rank) and "MASTER_ADDR" in os.environ
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
    "places in the order of roots, and roles that go round": """
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
    "waiting for what another rank does, without a collective": """
        import pathlib, threading, time
        watch = threading.Thread(target=time.sleep, args=[0.001])  # a thread that is no rank's own sleeps really
        watch.start()
        watch.join()
        done = pathlib.Path(__file__).with_name("done")
        if rank == size - 1:
            done.touch()
        while not done.exists():
            time.sleep(1000)
    """,
    "a module that keeps something for its process": """
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
def test_right_scripts_run(name: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "keeper.py").write_text(
        "import torch.distributed\nkept = []\nclass Thing: ...\ntorch.distributed.barrier()"
    )
    outcome = run(RIGHT[name], 4 if name == "sharded" else 3, "own")
    assert outcome.kind == "agreed", outcome.text
