"""The process groups and stores that `torch.distributed` sees; collectives are posted to the order check.

The base classes and `_new_process_group_helper` document the methods and their arguments. Time limits are ignored: a
collective that can never be completed is found without a clock.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

from aiodist._core.ledger import Member
from aiodist._torch import private
from aiodist._torch.collectives import Tensor, Tensors, call_on, op_name
from aiodist._torch.job import Collective, Job
from aiodist._torch.private import bindings, c10d, torch

_SUM = c10d.ReduceOp.SUM


class RankWork(bindings.Work):  # type: ignore[misc]
    """A collective that a rank has issued, with the tensors that its future returns."""

    def __init__(self, job: Job, member: Member, slot: Collective, outputs: Tensors) -> None:
        super().__init__()
        self._job, self._member, self._slot = job, member, slot
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._job.wait(self._member, self._slot)
        return True

    synchronize = wait

    def get_future(self) -> Any:
        self._job.wait(self._member, self._slot, for_future=True)
        future = RankFuture()
        future.work = self
        if self._slot.complete:
            future.set_result(self._outputs)
        else:
            self._slot.futures.append(partial(future.set_result, self._outputs))
        return future

    def is_completed(self) -> bool:
        """If it is not, let other ranks run: a program may ask in a loop."""
        if not self._slot.complete:
            self._job.ranks.sleep()
        return self._slot.complete

    def result(self) -> list[Tensor]:
        return self._outputs


class RankFuture(torch.futures.Future):  # type: ignore[misc]
    """The future of a collective; while a rank waits for it, others run."""

    work: RankWork

    def wait(self) -> Any:
        self.work.wait()
        return super().wait()


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in _flat(each)]


def _alike(tensors: Tensors) -> bool:
    return len({tuple(each.shape) for each in tensors}) == 1


def _root(opts: Any) -> int:
    """Return the root's rank in the group from options, or as it was passed."""
    root: int = getattr(opts, "rootRank", opts)
    return root


class RankGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A rank's process group, with torch's name for it, the backend that the script has asked for, and its store."""

    def __init__(self, job: Job, member: Member, name: str, desc: str, backend: str, store: Any) -> None:
        super().__init__(member.rank, len(member.group.members))
        self._job, self._member = job, member
        self._name, self._backend, self._store = name, backend, store
        self._set_group_desc(desc)

    # Properties.

    def name(self) -> str:
        return self._backend

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Return a name that DDP, in C++, does not take for one of torch's backends."""
        return "aiodist"

    group_name = pg_name = property(attrgetter("_name"))
    _device_types = property(lambda _: [torch.device("cpu")])
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device: Any) -> Any:
        return self

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._member.sequence

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no time limits, and coalesced collectives are posted one by one."""

    _set_default_timeout = _start_coalescing = _end_coalescing = _nothing

    def __repr__(self) -> str:
        return f"<process group {self._name} of {self.size()} ranks, checked by aiodist>"

    # Collectives.

    def post(
        self,
        kind: str,
        compared: Tensors = (),
        inputs: Tensors = (),
        outputs: Tensors = (),
        *,
        op: Any = None,
        root: int | None = None,
        rows: bool = True,
        result: Tensors | None = None,
    ) -> RankWork:
        """Post a collective that reads inputs and writes outputs; its future returns the result, else the outputs.

        Shapes and dtypes of the compared tensors must agree on all ranks; without ``rows``, sizes along axis 0 may
        differ. ``op`` is the reduce op, or options that contain it; ``root`` is the root's rank in the group.
        """
        name = None if op is None else op_name(getattr(op, "reduceOp", op))
        source = None if root is None else self._member.group.key[0][root]
        call = call_on(compared, kind, rows=rows, op=name, source=source)
        slot = self._job.post(self._member, call, inputs, outputs)
        return RankWork(self._job, self._member, slot, outputs if result is None else result)

    def _of_each(self, tensors: Any) -> list[Tensor]:
        """Return the tensors of a list that has one for each rank."""
        found = _flat(tensors)
        if len(found) != self.size():
            raise ValueError(f"expected a list of {self.size()} tensors, one for each rank, got {len(found)}")
        return found

    def _cut(self, *tensors: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Cut each tensor along axis 0 into parts of the given sizes, or into an equal part per rank."""
        rows = [tensor if tensor.dim() else tensor.view(-1) for tensor in tensors]
        return [part for each in rows for part in each.split(sizes or [each.shape[0] // self.size()] * self.size())]

    def allreduce(self, tensors: Any, opts: Any = _SUM, timeout: Any = None) -> RankWork:
        tensors = _flat(tensors)
        return self.post("all_reduce", tensors, tensors, tensors, op=opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> RankWork:
        tensors, root = _flat(tensors), _root(opts)
        written = tensors if self.rank() != root else ()
        return self.post("broadcast", tensors, tensors, written, root=root, result=tensors)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = _SUM, timeout: Any = None) -> RankWork:
        tensors, root, op = _flat(tensors), _root(opts), getattr(opts, "reduceOp", op)
        written = tensors if self.rank() == root else ()
        return self.post("reduce", tensors, tensors, written, op=op, root=root, result=tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:
        own, outputs = _flat(inputs)[0], self._of_each(outputs)
        return self.post("all_gather", [own] if _alike(outputs) else outputs, [own], outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:
        flat = [each[index] for index in range(len(inputs)) for each in outputs]
        return self.post("all_gather", inputs, inputs, flat)

    def all_gather_single(self, output: Any, own: Any, opts: Any = None) -> RankWork:
        inputs, outputs = _flat(own), _flat(output)  # one of each, or several
        return self.post("all_gather", inputs, inputs, self._cut(*outputs), result=outputs)

    _allgather_base = all_gather_single_coalesced = allgather_into_tensor_coalesced = all_gather_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:
        own, root = _flat(inputs), _root(opts)
        return self.post("gather", own, own, self._of_each(outputs) if self.rank() == root else (), root=root)

    def gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> RankWork:
        outputs = self._cut(output) if self.rank() == _root(opts) else ()
        return self.post("gather", [own], [own], outputs, root=_root(opts), result=[output])

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:
        own, root = _flat(outputs), _root(opts)
        return self.post("scatter", own, self._of_each(inputs) if self.rank() == root else (), own, root=root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = _SUM, timeout: Any = None) -> RankWork:
        own, values = _flat(outputs), self._of_each(inputs)
        return self.post("reduce_scatter", own if _alike(values) else values, values, own, op=opts)

    def reduce_scatter_single(self, output: Any, value: Any, opts: Any = _SUM) -> RankWork:
        outputs = _flat(output)  # one of each, or several
        return self.post("reduce_scatter", outputs, self._cut(*_flat(value)), outputs, op=opts)

    _reduce_scatter_base = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:
        own, values = self._of_each(outputs), self._of_each(inputs)
        return self.post("all_to_all", values[:1], values, own, rows=False)

    def all_to_all_single(
        self, output: Tensor, value: Tensor, output_sizes: Any = None, input_sizes: Any = None, *_: Any, **__: Any
    ) -> RankWork:
        own, values = self._cut(output, sizes=output_sizes), self._cut(value, sizes=input_sizes)
        return self.post("all_to_all", [value], values, own, rows=False, result=[output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> RankWork:
        return self.post("barrier")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.post("monitored_barrier").wait()

    # Messages.

    def send(self, tensors: Any, to: int, tag: int = 0) -> RankWork:
        return RankWork(self._job, *self._job.message(self._member, self.rank(), to, tag, tensors), ())

    def recv(self, tensors: Any, source: int, tag: int = 0) -> RankWork:
        return RankWork(self._job, *self._job.message(self._member, source, self.rank(), tag, tensors), tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RankWork:
        raise NotImplementedError("aiodist check cannot carry out a recv without src: from any rank")


class RankStore(c10d.Store):  # type: ignore[misc]
    """A store that the ranks share; while a rank waits for a key, others run."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._values = bindings.HashStore()

    def _changed(self, found: Any) -> Any:
        self._job.ranks.wake()
        return found

    def set(self, key: str, value: str | bytes) -> None:
        self._changed(self._values.set(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values.get(key)  # type: ignore[no-any-return]

    def add(self, key: str, number: int) -> int:
        return self._changed(self._values.add(key, number))  # type: ignore[no-any-return]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._changed(self._values.compare_set(key, expected, desired))  # type: ignore[no-any-return]

    def num_keys(self) -> int:
        return self._values.num_keys()  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        return self._values.delete_key(key)  # type: ignore[no-any-return]

    getNumKeys, deleteKey = num_keys, delete_key  # noqa: N815  (C++ calls them so)

    def check(self, keys: Sequence[str]) -> bool:
        """If a key is missing, let other ranks run: a program may ask in a loop."""
        found: bool = self._values.check(keys)
        if not found:
            self._job.ranks.sleep()
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            if not self._values.check([key]):
                self._job.wait_elsewhere(partial(self._values.check, [key]), f"waits for key {key!r} of the store")


def install(job: Job) -> None:
    """Make `torch.distributed` create the groups and stores of a job, and refuse RPC, which waits out of our sight."""
    stores: defaultdict[str, RankStore] = defaultdict(partial(RankStore, job))

    def rendezvous(_url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
        world_size = world_size if world_size >= 0 else int(os.environ.get("WORLD_SIZE", "-1"))
        _check(job, rank, world_size)
        yield stores["default"], rank, world_size

    def tcp_store(host: str = "", port: int = 0, *_: Any, **__: Any) -> RankStore:
        return stores[f"{host}:{port}"]

    def file_store(path: str, *_: Any, **__: Any) -> RankStore:
        return stores[path]

    def init_rpc(*_: Any, **__: Any) -> None:
        raise NotImplementedError("aiodist check cannot run torch.distributed.rpc")

    private.install(partial(_new_group, job), rendezvous)
    torch.distributed.TCPStore, torch.distributed.FileStore = tcp_store, file_store
    private.load("torch.distributed.rpc").init_rpc = init_rpc


def _check(job: Job, rank: int, size: int) -> None:
    if size != job.size:
        raise RuntimeError(f"the script asks for {size} ranks: run aiodist check with --ranks {size}")
    if rank != job.rank():
        raise RuntimeError(
            f"the script calls this rank {rank}, but it is rank {job.rank()}: RANK in the environment says so"
        )


def _new_group(
    job: Job,
    group_size: int,
    group_rank: int | None,
    ranks: Sequence[int],
    backend: Any,
    store: Any,
    group_name: str,
    *_: Any,  # options and time limits
    pg_tag: str | None = None,
    group_desc: str | None = None,
    **__: Any,
) -> tuple[Any, Any]:
    """Make a process group in place of `_new_process_group_helper`, which documents the arguments."""
    found = private.existing_group(pg_tag, list(ranks))
    if found is not None:
        return found  # type: ignore[no-any-return]
    rank = job.rank()
    if not ranks:
        _check(job, rank if group_rank is None else group_rank, group_size)
    member = job.new_group(tuple(ranks), group_name) if ranks else job.ledger.root.member_of(rank)
    if member is None:
        return c10d.GroupMember.NON_GROUP_MEMBER, None
    own_store = c10d.PrefixStore(f"{group_name}/", store)
    group = RankGroup(job, member, group_name, group_desc or "undefined", str(backend), own_store)
    tag = {"add_to_default_tag": True} if not pg_tag else {"pg_tag": f"user:{pg_tag}"}
    private.register(
        group, backend_name=backend, store=own_store, group_name=group_name,
        backend_config=str(c10d.BackendConfig(c10d.Backend(backend))), **tag,
    )  # fmt: skip
    if not ranks:  # torch also waits for all ranks here
        group.post("init_process_group").wait()
    return group, own_store
