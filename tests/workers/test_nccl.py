"""Arrays on GPUs that go through NCCL: what they come to, which do, who may, and what becomes of its failures."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from aiodist import (
    CollectiveError,
    CollectiveMismatchError,
    CommunicationOptions,
    IncompleteCollectiveError,
    MultiWorkerMirroredStrategy,
    ReduceOp,
    ReplicaContext,
    WorkerLostError,
    get_replica_context,
)
from aiodist.gpu import nccl
from aiodist.vocabulary import gpus
from aiodist.workers import nccl_choice, nccl_plane
from aiodist.workers.nccl_choice import Offer
from aiodist_kernels import reduce
from tests.gpu.conftest import PlantedArray
from tests.kernels import arrays
from tests.kernels.arrays import ALL, BFLOAT16, BOOL, assert_same_bits
from tests.kernels.test_reduce import DEFINED
from tests.replica.warned import warned
from tests.workers.nccl_job import NcclJob

if TYPE_CHECKING:
    from tests.workers.simulated import Program

pytestmark = pytest.mark.anyio

SINGLE = np.dtype(np.float32)
PAIR = (1, 1)


def small(seed: int, n: int, dtype: np.dtype, size: int = 700) -> list[np.ndarray]:
    """Return values whose sums and products are exact, so that no order of them shows."""
    generator = np.random.default_rng(seed)
    return [generator.choice([1, 2, 1, 1], size).astype(dtype) for _ in range(n)]


async def reduced(job: NcclJob, op: ReduceOp, values: list[np.ndarray]) -> list[PlantedArray]:
    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        return await ctx.all_reduce(op, job.put(me, values[me]))

    return await job.values(program)


@pytest.mark.parametrize("unloaded", [False, True], ids=["kernels are there", "kernels are compiled"])
@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=str)
async def test_every_reduction_has_the_bits_of_the_host(
    monkeypatch: pytest.MonkeyPatch, op: ReduceOp, dtype: np.dtype, unloaded: bool
) -> None:
    if dtype.itemsize > 16 or (unloaded and op is not ReduceOp.MEAN):
        return
    job = NcclJob(monkeypatch, PAIR, unloaded=unloaded)
    values = arrays.buffers(5, 2, (700,), dtype)
    for me, result in enumerate(await reduced(job, op, values)):
        assert result.ordinal == me
        assert_same_bits(result.numpy(), reduce(op, values))
    assert len(job.nccl.steps) == (2 if nccl_choice.takes(op, dtype) else 0)


@pytest.mark.parametrize("counts", [(2, 1, 2), (1, 3), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(np.int32), SINGLE, BFLOAT16], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT], ids=str)
async def test_layouts(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], op: ReduceOp, dtype: np.dtype) -> None:
    job = NcclJob(monkeypatch, counts)
    values = small(1, sum(counts), dtype)
    results = await reduced(job, op, values)
    assert len(job.nccl.steps) == len(counts), "one step a worker"
    assert len({id(result.memory) for result in results}) == len(results)
    for result in results:
        assert_same_bits(result.numpy(), reduce(op, values))


def test_table_of_what_nccl_reduces() -> None:
    half, small_integers = {np.dtype(np.float16), BFLOAT16}, {np.dtype(np.int16), np.dtype(np.uint16)}
    floats = {SINGLE, np.dtype(np.float64)}
    numbers = [dtype for dtype in ALL if dtype != BOOL]

    def taken(op: ReduceOp) -> set[np.dtype]:
        return {dtype for (other, dtype) in DEFINED if other is op and nccl_choice.takes(op, dtype)}

    assert taken(ReduceOp.MEAN) == set(numbers), "each in the accumulator that it has anyway"
    assert taken(ReduceOp.SUM) == set(numbers) - small_integers
    assert taken(ReduceOp.PRODUCT) == {dtype for dtype in numbers if dtype.kind != "c"} - small_integers
    integers = {dtype for dtype in numbers if dtype.kind in "iu"} - small_integers
    assert taken(ReduceOp.MAX) == taken(ReduceOp.MIN) == integers | {BOOL}
    assert not (half | floats) & taken(ReduceOp.MIN), "NCCL would drop a NaN"


async def test_nest_with_leaves_that_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, (2, 1))

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        value = {
            "a": job.put(me, np.full((3, 50), me, SINGLE)),
            "b": np.full(4, me),
            "c": me,
            "d": job.put(me, np.full(200, me, np.int16)),
            "e": job.put(me, np.full((), me, np.float64)),
            "f": job.put(me, np.zeros((0, 3), SINGLE)),
        }
        return await ctx.all_reduce("SUM", value)

    for me, result in enumerate(await job.values(program)):
        assert list(result) == list("abcdef")
        assert_same_bits(result["a"].numpy(), np.full((3, 50), 3, SINGLE))
        assert_same_bits(result["b"], np.full(4, 3))
        assert result["c"] == 3
        assert_same_bits(result["d"].numpy(), np.full(200, 3, np.int16))
        assert_same_bits(result["e"].numpy(), np.full((), 3, np.float64))
        assert result["f"].shape == (0, 3)
        assert result["d"].ordinal == job.ordinals[me]
    assert sorted(job.nccl.steps) == [(rank, ReduceOp.SUM, ("float32", "float64")) for rank in (0, 1)]


async def test_small_values_go_with_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR)
    await reduced(job, ReduceOp.SUM, small(1, 2, SINGLE, size=112))
    assert not job.nccl.steps
    await reduced(job, ReduceOp.SUM, small(1, 2, SINGLE, size=113))
    assert len(job.nccl.steps) == 2


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
async def test_result_in_buffers_of_ones_own(monkeypatch: pytest.MonkeyPatch, op: ReduceOp) -> None:
    job = NcclJob(monkeypatch, (2, 1))

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        mine = job.put(me, np.full(200, 2 * me, SINGLE))
        out = mine if me == 1 else job.put(me, np.zeros(200, SINGLE))
        assert await ctx.all_reduce(op, mine, out=out) is out
        return out

    for result in await job.values(program):
        assert set(result.numpy()) == {6.0 if op is ReduceOp.SUM else 2.0}
    assert job.nccl.steps


async def test_first_replica_says_how_to_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR)

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        options = None if me else CommunicationOptions(accumulate="float64")
        return await ctx.all_reduce("SUM", job.put(me, np.full(300, 0.1 * (me + 1), SINGLE)), options)

    await job.values(program)
    assert [kinds for *_, kinds in job.nccl.steps] == [("float64",)] * 2


async def test_link_is_made_once_and_ended_with_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR)
    for _ in range(3):
        await reduced(job, ReduceOp.SUM, small(1, 2, SINGLE))
    assert len(job.nccl.links) == job.nccl.open_links == 2
    for strategy in job.strategies:
        strategy.close()
    assert job.nccl.open_links == 0


async def test_no_link_outlives_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR)
    for turn in range(50):
        await reduced(job, ReduceOp.SUM, small(1, 2, SINGLE))
        if turn % 2:
            for strategy in job.strategies:
                strategy.close()
        job.cluster = type(job.cluster)(2)
        job.strategies = job.new_strategies()
        if turn % 10 == 0:
            gc.collect()
    gc.collect()
    assert len(job.nccl.links) == 100
    assert job.nccl.open_links == 0
    assert not nccl_plane._users


# Who may.


async def test_host_serves_where_nobody_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR, same=True)
    await reduced(job, ReduceOp.SUM, small(1, 2, SINGLE))
    assert not job.nccl.links


@pytest.mark.parametrize("options", [{"implementation": "ring"}, {"reduction": "ordered"}], ids=str)
async def test_options_leave_it_out_where_one_worker_has_them(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    job = NcclJob(monkeypatch, PAIR, options=[{}, options] if "implementation" in options else options)
    await reduced(job, ReduceOp.SUM, small(1, 2, SINGLE))
    assert not job.nccl.links


class Layout:
    """Of two workers, the second of which has no GPU."""

    devices = (("GPU:0",), ("CPU:0", "GPU:1"))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (None, "worker 1 of 2 has its first replica on CPU:0, where NCCL needs a GPU"),
        (Offer("auto", "2.27.3", "b"), "worker 0 has NCCL 2.32.3, and worker 1 has 2.27.3"),
        (Offer("auto", "2.32.3", "a"), "workers 0 and 1 share a GPU, where NCCL needs one for each"),
        (
            Offer("auto", missing="has no NCCL: its library was not found: pip install 'aiodist[nccl]'"),
            "worker 1 of 2 has no NCCL: its library was not found: pip install 'aiodist[nccl]'",
        ),
        (Offer("auto", "2.32.3", "b"), None),
    ],
    ids=["no GPU", "another version", "the same GPU", "no library", "all is there"],
)
def test_all_workers_judge_alike(other: Offer | None, reason: str | None) -> None:
    offers = [Offer("auto", "2.32.3", "a"), other]
    assert nccl_choice.why_not(offers, Layout()) == reason  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    demanding = [Offer("nccl", "2.32.3", "a"), other]
    if reason is None:
        assert nccl_choice.why_not(demanding, Layout()) is None  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        return
    with pytest.raises(RuntimeError) as raised:
        nccl_choice.why_not(demanding, Layout())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert str(raised.value) == (
        f"worker 0 has implementation='nccl', and NCCL cannot be used: {reason}. Leave the option out, and arrays on "
        "GPUs go through NCCL where they can, and else through the host"
    )


def test_machine_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> None:
        raise ImportError("NCCL's binding, nccl4py, is not installed: pip install 'aiodist[nccl]' (No module …)")

    monkeypatch.setattr(nccl, "library", library)
    monkeypatch.setattr(gpus, "find", lambda: gpus.Found((gpus.Gpu(0, "planted", (9, 0), "a"),), "13.0"))
    found = nccl_choice.offer("GPU:0", CommunicationOptions())
    assert found.missing.startswith("has no NCCL: NCCL's binding, nccl4py, is not installed: pip install 'aiodist[")
    assert nccl_choice.offer("CPU:3", CommunicationOptions()).missing.startswith("has its first replica on CPU:3")


async def test_demanded_where_it_cannot_be_used_it_is_an_error_on_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR, same=True, options=[{}, {"implementation": "nccl"}])
    for outcome in await job.run(_nothing):
        assert isinstance(outcome, RuntimeError)
        assert str(outcome).startswith("worker 1 has implementation='nccl', and NCCL cannot be used: workers 0 and 1")


async def _call(program: Program) -> Any:
    return await program(get_replica_context())


async def _nothing(ctx: ReplicaContext) -> None:
    await ctx.barrier()


async def test_one_run_at_a_time_has_the_use_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR)
    begun = [anyio.Event(), anyio.Event()]
    over = [anyio.Event(), anyio.Event()]
    values = small(1, 2, SINGLE)

    async def first(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        begun[me].set()
        await over[me].wait()
        return await ctx.all_reduce("SUM", job.put(me, values[me]))

    async def second(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        return await ctx.all_reduce("SUM", job.put(me, values[me]))

    found: list[Any] = []

    async def run(program: Any) -> None:
        found.extend(await job.values(program))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, first)
        for event in begun:
            await event.wait()
        await run(second)
        assert not job.nccl.steps
        for event in over:
            event.set()
    assert len(job.nccl.steps) == 2
    for result in found:
        assert_same_bits(result.numpy(), reduce(ReduceOp.SUM, values))


# What goes wrong.


async def test_workers_that_differ_give_nccl_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR)

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        await ctx.all_reduce("MAX" if me else "SUM", job.put(me, np.ones(300, np.int32)))

    for outcome in await job.run(program):
        assert isinstance(outcome, CollectiveMismatchError)
    assert not job.nccl.steps
    await check_that_it_works(job)


async def check_that_it_works(job: NcclJob) -> None:
    """Check that the next run goes through NCCL, and is right."""
    job.nccl.steps.clear()
    values = small(2, sum(job.counts), SINGLE)
    for result in await reduced(job, ReduceOp.SUM, values):
        assert_same_bits(result.numpy(), reduce(ReduceOp.SUM, values))
    assert len(job.nccl.steps) == len(job.counts)
    assert job.nccl.open_links == len(job.counts)


@pytest.mark.parametrize("rank", [0, 1])
async def test_where_one_cannot_be_linked_all_go_through_the_host(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(nccl_plane, "LINK_SECONDS", 0.2)
    job = NcclJob(monkeypatch, (1, 1, 1))
    job.nccl.fail = rank
    values = small(1, 3, SINGLE)
    with warned() as told:
        results = await reduced(job, ReduceOp.SUM, values)
    why = f"worker {rank} of 3: NCCL cannot link the workers: planted"
    assert any(why in warning.text and warning.category is RuntimeWarning for warning in told)
    for result in [*results, *await reduced(job, ReduceOp.SUM, values)]:
        assert_same_bits(result.numpy(), reduce(ReduceOp.SUM, values))
    assert not job.nccl.steps
    assert job.nccl.open_links == 0


async def test_where_one_cannot_be_linked_and_it_is_demanded_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_plane, "LINK_SECONDS", 0.2)
    job = NcclJob(monkeypatch, PAIR, options={"implementation": "nccl"})
    job.nccl.fail = 0
    for outcome in await job.run(_nothing):
        assert isinstance(outcome, RuntimeError)
        assert str(outcome) == (
            "implementation='nccl', and NCCL cannot link the workers: worker 0 of 2: NCCL cannot link the workers: "
            "planted"
        )


def refuse(job: NcclJob) -> None:
    job.nccl.refuse = 1


def fail_later(job: NcclJob) -> None:
    job.nccl.late = {0, 1}
    link = next(link for link in job.nccl.links if link.rank == 1)
    link.is_ready = lambda: (_ for _ in ()).throw(RuntimeError("NCCL has failed: planted")) if link.count else True  # type: ignore[method-assign]


@pytest.mark.parametrize("breaks", [refuse, fail_later])
async def test_failure_of_one_is_told_to_all_and_the_next_run_has_another_link(
    monkeypatch: pytest.MonkeyPatch, breaks: Any
) -> None:
    monkeypatch.setattr(nccl_plane, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("aiodist.replica.carrying._ENGINE_GRACE_SECONDS", 0.1)
    job = NcclJob(monkeypatch, PAIR)
    await check_that_it_works(job)
    breaks(job)
    values = small(1, 2, SINGLE)

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        return await ctx.all_reduce("SUM", job.put(me, values[me]))

    first, second = await job.run(program)
    assert isinstance(second, RuntimeError)
    assert "planted" in str(second)
    assert isinstance(first, IncompleteCollectiveError)
    assert "planted" in str(first)
    assert str(first.__cause__) == str(second)
    job.nccl.refuse, job.nccl.late = None, set()
    await check_that_it_works(job)


async def test_lost_worker_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, (1, 1, 1))
    job.nccl.late = {0, 1, 2}
    values = small(1, 3, SINGLE)

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        return await ctx.all_reduce("SUM", job.put(me, values[me]))

    gone = anyio.CancelScope()

    async def lose() -> None:
        while len(job.nccl.steps) < 3:
            await anyio.lowlevel.checkpoint()
        job.cluster.lose(2, "has died")
        job.strategies[2].close()
        gone.cancel()  # what is left of it in this process

    async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
        with gone if strategy is job.strategies[2] else anyio.CancelScope():
            return await strategy.run(_call, (program,))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose)
        for outcome in (await job.everywhere(one))[:2]:
            assert isinstance(outcome, WorkerLostError), outcome
    assert job.nccl.open_links == 0


async def test_replicas_that_have_joined_leave_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, (2, 1))
    seen: dict[int, list[Any]] = {me: [] for me in range(3)}

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        for step in range(me + 1):
            total = await ctx.all_reduce("SUM", {"v": job.put(me, np.full(200, me + step, SINGLE)), "n": 1})
            seen[me].append((set(total["v"].numpy()), total["n"]))
        await ctx.join()

    await job.values(program)
    steps = [({3}, 3), ({5}, 2), ({4}, 1)]
    assert seen == {me: steps[: me + 1] for me in range(3)}
    assert len(job.nccl.steps) == 2, "of the first step alone"


async def test_groups_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, (2, 1))

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        if me == 1:
            return None
        some = ctx.new_group([0, 2])
        return set((await some.all_reduce("SUM", job.put(me, np.full(200, me, SINGLE)))).numpy())

    assert await job.values(program) == [{2}, None, {2}]
    assert not job.nccl.steps


async def test_timeout_elsewhere_is_a_verdict_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, PAIR)

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        await ctx.all_reduce("SUM", job.put(me, np.ones(300, SINGLE)))
        if me:
            raise ValueError("mine")
        await ctx.all_reduce("SUM", job.put(me, np.ones(300, SINGLE)))

    first, second = await job.run(program)
    assert isinstance(first, CollectiveError)
    assert isinstance(second, ValueError)
    await check_that_it_works(job)
