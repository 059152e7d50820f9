"""Process groups as torch sees them: their collectives are posted to the order check of the job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from aiodist._core.ledger import Member
from aiodist._torch.job import AnySource, Job, Pending
from aiodist._torch.kinds import Contribution, Tensor, call, op_name, parts
from aiodist._torch.private import bindings, c10d, torch


class RankFuture(torch.futures.Future):  # type: ignore[misc]
    """The future of a collective; a rank that waits for it lets others run."""

    job: Job
    pending: Pending

    def wait(self) -> Any:
        """Return the outputs once they are there."""
        self.job.wait(*self.pending)
        return super().wait()


class RankWork(bindings.Work):  # type: ignore[misc]
    """A collective that a rank has issued, and the tensors that its future is to have."""

    def __init__(self, job: Job, pending: Pending | AnySource, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._job = job
        self._pending = pending
        self._outputs = list(outputs)

    def _found(self) -> Pending:
        """Return what is waited for; of a receive from anybody, once somebody has sent."""
        if isinstance(self._pending, Pending):
            return self._pending
        bound = self._pending
        self._job.wait_elsewhere(bound.signal, lambda: bound.pending is not None, "waits for a message of any rank")
        assert bound.pending is not None
        return bound.pending

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  (nothing here takes time)
        """Let other ranks run until it is complete."""
        self._job.wait(*self._found())
        return True

    def synchronize(self) -> None:
        """Let other ranks run until it is complete."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future with the outputs."""
        pending = self._found()
        self._job.wait(*pending, for_future=True)
        future = RankFuture()
        future.job, future.pending = self._job, pending
        if pending.slot.complete:
            future.set_result(self._outputs)
        else:
            pending.slot.futures.append(partial(future.set_result, self._outputs))
        return future

    def is_completed(self) -> bool:
        """Return whether it is complete; if not, other ranks get a turn, for a program may ask until it is."""
        pending = self._pending if isinstance(self._pending, Pending) else self._pending.pending
        complete = pending is not None and pending.slot.complete
        if not complete:
            self._job.ranks.sleep(0.0)
        return complete

    is_success = is_completed

    def exception(self) -> None:
        """Return None: what goes wrong is raised where a rank waits."""

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def _source_rank(self) -> int:
        source = self._pending.source if isinstance(self._pending, AnySource) else None
        return -1 if source is None else source

    source_rank = _source_rank


def _list(tensors: Any) -> list[Tensor]:
    """Return tensors as a flat list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in _list(each)]


def _root(opts: Any) -> int:
    """Return the root's rank in the group, out of options or as it is."""
    root: int = getattr(opts, "rootRank", opts)
    return root


class RankGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A rank's process group: what torch knows it by, the backend that the script has asked for, and its store."""

    def __init__(self, job: Job, member: Member, size: int, name: str, desc: str, backend: str, store: Any) -> None:
        super().__init__(member.rank, size)
        self._job = job
        self._member = member
        self._size = size
        self._name = name
        self._desc = desc
        self._backend = backend
        self._store = store
        self._set_group_desc(desc)

    def begin(self) -> None:
        """Wait until all ranks have made it."""
        self._post("init_process_group").wait()

    # What it is.

    def rank(self) -> int:
        """Return this rank's rank in the group."""
        return self._member.rank

    def size(self) -> int:
        """Return how many members there are."""
        return self._size

    def name(self) -> str:
        """Return the backend that the script has asked for."""
        return self._backend

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Return a name of which DDP, in C++, does not think that it knows what is behind it."""
        return "aiodist"

    @property
    def group_name(self) -> str:
        """What torch knows the group by."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """Its description."""
        return self._desc

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:  # noqa: ARG002
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def get_group_store(self) -> Any:
        """Return its store."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._member.sequence

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing: what can never be complete is found without a clock, and there is nothing to close."""

    set_timeout = _set_default_timeout = _set_sequence_number_for_group = shutdown = abort = _nothing
    _start_coalescing = _end_coalescing = _nothing  # what is issued in between is posted one by one

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise NotImplementedError("aiodist check cannot carry out ProcessGroup.split_group: make groups by new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise NotImplementedError("aiodist check cannot carry out ProcessGroup.merge_remote_group")

    def __repr__(self) -> str:
        return f"<process group {self._name} of {self._size} ranks, checked by aiodist>"

    # Collectives. Options give op and root; timeouts are of no use.

    def _post(
        self,
        kind: str,
        compared: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        *,
        op: Any = None,
        root: int | None = None,
        rows: bool = True,
        result: Sequence[Tensor] | None = None,
    ) -> RankWork:
        """Post a collective.

        Args:
            kind: which.
            compared: the tensors whose shapes and dtypes must agree.
            inputs: those that are read.
            outputs: those that are written.
            op: the reduce op, or options that have it.
            root: the root's rank in the group.
            rows: whether sizes along axis 0 must agree, too.
            result: what the future is to have; None for the outputs.
        """
        group = self._member.group
        name = None if op is None else op_name(getattr(op, "reduceOp", op))
        asked = call(kind, compared, op=name, root=None if root is None else group.key[0][root], rows=rows)
        slot = self._job.post(group, self._member, Contribution(asked, inputs, outputs, -1 if root is None else root))
        return RankWork(self._job, Pending(self._member, slot), outputs if result is None else result)

    def _cut(self, *tensors: Tensor) -> list[Tensor]:
        """Return as many equal parts of each tensor as there are ranks."""
        rows = [tensor if tensor.dim() else tensor.view(-1) for tensor in tensors]
        return [part for tensor in rows for part in parts(tensor, (), self._size)]

    def allreduce(self, tensors: Any, opts: Any = c10d.ReduceOp.SUM, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Reduce tensors; every rank gets the results."""
        tensors = _list(tensors)
        return self._post("all_reduce", tensors, tensors, tensors, op=opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks the root's tensors."""
        tensors, root = _list(tensors), _root(opts)
        written = tensors if self.rank() != root else ()
        return self._post("broadcast", tensors, tensors, written, root=root, result=tensors)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = c10d.ReduceOp.SUM, timeout: Any = None  # noqa: ARG002
    ) -> RankWork:  # fmt: skip
        """Reduce tensors; the root gets the results."""
        tensors, root, op = _list(tensors), _root(opts), getattr(opts, "reduceOp", op)
        written = tensors if self.rank() == root else ()
        return self._post("reduce", tensors, tensors, written, op=op, root=root, result=tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks all ranks' tensors."""
        own, outputs = _list(inputs)[0], _list(outputs)
        mine = outputs[self.rank()]
        if mine.shape != own.shape:
            shapes = f"output {self.rank()} has shape {tuple(mine.shape)}, the input {tuple(own.shape)}"
            raise ValueError(f"all_gather: {shapes}")
        alike = all(output.shape == own.shape for output in outputs)
        return self._post("all_gather", [own] if alike else outputs, [own], outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks all ranks' lists of tensors."""
        flat = [each[index] for index in range(len(inputs)) for each in outputs]
        return self._post("all_gather", inputs, inputs, flat)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> RankWork:
        """Give all ranks all ranks' tensors, as one."""
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks several tensors of all ranks, each as one."""
        return self._post("all_gather", inputs, inputs, self._cut(*outputs), result=outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give the root all ranks' tensors."""
        own = _list(inputs)
        return self._post("gather", own, own, _list(outputs), root=_root(opts))

    def gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> RankWork:
        """Give the root all ranks' tensors, as one."""
        outputs = self._cut(output) if self.rank() == _root(opts) else ()
        return self._post("gather", [own], [own], outputs, root=_root(opts), result=[output])

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give every rank one of the root's tensors."""
        own = _list(outputs)
        return self._post("scatter", own, _list(inputs), own, root=_root(opts))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = c10d.ReduceOp.SUM, timeout: Any = None  # noqa: ARG002
    ) -> RankWork:  # fmt: skip
        """Reduce lists of tensors; every rank gets one of the results."""
        own, values = _list(outputs), _list(inputs)
        alike = all(value.shape == own[0].shape for value in values)
        return self._post("reduce_scatter", own if alike else values, values, own, op=opts)

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any = c10d.ReduceOp.SUM) -> RankWork:
        """Reduce a tensor; every rank gets a part of the result."""
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = c10d.ReduceOp.SUM) -> RankWork:
        """Reduce several tensors; every rank gets a part of each result."""
        return self._post("reduce_scatter", outputs, self._cut(*inputs), outputs, op=opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give every rank one of each rank's tensors."""
        own, values = _list(outputs), _list(inputs)
        alike = len({tuple(each.shape) for each in (*own, *values)}) == 1
        return self._post("all_to_all", values if alike else values[:1], values, own, rows=alike)

    def all_to_all_single(
        self, output: Tensor, value: Tensor, output_sizes: Any = (), input_sizes: Any = (), opts: Any = None,  # noqa: ARG002
        timeout: Any = None,  # noqa: ARG002
    ) -> RankWork:  # fmt: skip
        """Give every rank a part of each rank's tensor."""
        own = parts(output, output_sizes or (), self._size)
        values = parts(value, input_sizes or (), self._size)
        even = not (output_sizes or input_sizes)
        return self._post("all_to_all", [value], values, own, rows=even, result=[output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Wait for all ranks."""
        return self._post("barrier")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Wait for all ranks."""
        self._post("monitored_barrier").wait()

    # Messages.

    def send(self, tensors: Any, to: int, tag: int = 0) -> RankWork:
        """Send tensors to a rank."""
        return RankWork(self._job, self._job.send(self._member, to, tag, tensors), ())

    def recv(self, tensors: Any, source: int, tag: int = 0) -> RankWork:
        """Receive tensors from a rank."""
        return RankWork(self._job, self._job.receive(self._member, source, tag, tensors), tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RankWork:
        """Receive tensors from whoever sends some."""
        return RankWork(self._job, self._job.receive_any(self._member, tag, tensors), tensors)
