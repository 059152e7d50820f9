"""Process groups as torch sees them: their collectives are posted to the order check of the job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from aiodist._core.ledger import Member
from aiodist._torch.kinds import Contribution, Tensor, call, check_op, op_name, parts
from aiodist._torch.private import bindings, c10d, torch
from aiodist._torch.world import AnySource, Collective, Job, Pending


class RankFuture(torch.futures.Future):  # type: ignore[misc]
    """The future of a collective; a rank that waits for it lets others run."""

    pending: tuple[Job, Member, Collective]

    def wait(self) -> Any:
        """Return the outputs once they are there."""
        job, member, slot = self.pending
        job.wait(member, slot)
        return super().wait()


class RankWork(bindings.Work):  # type: ignore[misc]
    """A collective that a rank has issued."""

    def __init__(self, job: Job, pending: Pending | AnySource, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._job = job
        self._pending = pending
        self._outputs = list(outputs)

    def of(self, *outputs: Tensor) -> RankWork:
        """Return the same, with the tensors that its future is to have."""
        self._outputs = list(outputs)
        return self

    def _found(self) -> Pending:
        pending = self._pending
        if isinstance(pending, AnySource):
            bound = pending
            self._job.wait_elsewhere(bound.signal, lambda: bound.pending is not None, "waits for a message of any rank")
            assert bound.pending is not None
            return bound.pending
        return pending

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  (nothing here takes time)
        """Let other ranks run until it is complete."""
        self._job.wait(*self._found())
        return True

    def get_future(self) -> Any:
        """Return a future with the outputs."""
        member, slot = self._found()
        self._job.wait(member, slot, for_future=True)
        future = RankFuture()
        future.pending = self._job, member, slot
        if slot.complete:
            future.set_result(self._outputs)
        else:
            slot.futures.append(partial(future.set_result, self._outputs))
        return future

    def is_completed(self) -> bool:
        """Return whether it is complete; if not, other ranks get a turn, for a program may ask until it is."""
        complete = isinstance(self._pending, tuple) and self._pending[1].complete
        if not complete:
            self._job.ranks.sleep(0.0)
        return complete

    def is_success(self) -> bool:
        """Return whether it is complete."""
        return self.is_completed()

    def exception(self) -> None:
        """Return None: what goes wrong is raised where a rank waits."""

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def synchronize(self) -> None:
        """Let other ranks run until it is complete."""
        self.wait()

    def _source_rank(self) -> int:
        source = self._pending.source if isinstance(self._pending, AnySource) else None
        return -1 if source is None else source

    source_rank = _source_rank


def _list(tensors: Any) -> list[Tensor]:
    """Return tensors as a flat list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in _list(each)]


def _lists(nested: Any) -> list[list[Tensor]]:
    """Return lists of tensors, where one alone may stand without its outer list."""
    return [[*nested]] if nested and isinstance(nested[0], torch.Tensor) else [[*each] for each in nested]


class RankGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A rank's process group.

    Args:
        job: the job.
        member: the rank as a member of the group.
        size: how many members there are.
        name: what torch knows the group by.
        desc: its description.
        backend: what the script has asked for.
        store: its store.
    """

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

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the ledger numbers collectives."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing: what can never be complete is found without a clock."""

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Nothing: there is nothing to close."""

    abort = shutdown

    def __repr__(self) -> str:
        return f"<process group {self._name} of {self._size} ranks, checked by aiodist>"

    # Collectives.

    def _post(
        self,
        kind: str,
        compared: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        *,
        op: Any = None,
        root: int | None = None,
        **more: Any,
    ) -> RankWork:
        name = None
        if op is not None:
            name = op_name(getattr(op, "reduceOp", op))
            check_op(name)
        group = self._member.group
        asked = call(kind, compared, op=name, root=None if root is None else group.key[0][root], **more)
        contribution = Contribution(asked, inputs, outputs, -1 if root is None else root)
        slot = self._job.post(group, self._member, contribution)
        return RankWork(self._job, (self._member, slot), outputs)

    def allreduce(self, tensors: Any, opts: Any = c10d.ReduceOp.SUM, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Reduce tensors; every rank gets the results."""
        tensors = _list(tensors)
        return self._post("all_reduce", tensors, tensors, tensors, op=opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks the root's tensors."""
        tensors = _list(tensors)
        return self._post("broadcast", tensors, tensors, tensors, root=getattr(opts, "rootRank", opts))

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = c10d.ReduceOp.SUM, timeout: Any = None  # noqa: ARG002
    ) -> RankWork:  # fmt: skip
        """Reduce tensors; the root gets the results."""
        tensors = _list(tensors)
        return self._post(
            "reduce", tensors, tensors, tensors, op=getattr(opts, "reduceOp", op), root=getattr(opts, "rootRank", opts)
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks all ranks' tensors."""
        (own,), (outputs,) = _list(inputs), _lists(outputs)
        if outputs[self.rank()].shape != own.shape:
            raise ValueError(
                f"all_gather: output {self.rank()} has shape {tuple(outputs[self.rank()].shape)}, the input "
                f"{tuple(own.shape)}"
            )
        alike = all(output.shape == own.shape for output in outputs)
        return self._post("all_gather", [own] if alike else outputs, [own], outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks all ranks' lists of tensors."""
        flat = [each[index] for index in range(len(inputs)) for each in outputs]
        return self._post("all_gather", inputs, inputs, flat)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks all ranks' tensors, as one."""
        work = self._post("all_gather", [own], [own], self._cut(output))
        return work.of(output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:  # noqa: ARG002
        """Give all ranks several tensors of all ranks, each as one."""
        flat = [part for output in outputs for part in self._cut(output)]
        return self._post("all_gather", inputs, inputs, flat).of(*outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give the root all ranks' tensors."""
        own = _list(inputs)
        return self._post("gather", own, own, _list(outputs), root=getattr(opts, "rootRank", opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Give every rank one of the root's tensors."""
        own = _list(outputs)
        return self._post("scatter", own, _list(inputs), own, root=getattr(opts, "rootRank", opts))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = c10d.ReduceOp.SUM, timeout: Any = None  # noqa: ARG002
    ) -> RankWork:  # fmt: skip
        """Reduce lists of tensors; every rank gets one of the results."""
        own, (values,) = _list(outputs), _lists(inputs)
        alike = all(value.shape == own[0].shape for value in values)
        return self._post("reduce_scatter", own if alike else values, values, own, op=opts)

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any = c10d.ReduceOp.SUM) -> RankWork:
        """Reduce a tensor; every rank gets a part of the result."""
        return self._post("reduce_scatter", [output], self._cut(value), [output], op=opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = c10d.ReduceOp.SUM) -> RankWork:
        """Reduce several tensors; every rank gets a part of each result."""
        flat = [part for value in inputs for part in self._cut(value)]
        return self._post("reduce_scatter", outputs, flat, outputs, op=opts)

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
        return self._post("all_to_all", [value], values, own, rows=even).of(output)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> RankWork:  # noqa: ARG002
        """Wait for all ranks."""
        return self._post("barrier")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Wait for all ranks."""
        self._post("monitored_barrier").wait()

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        return parts(tensor.view(-1) if not tensor.dim() else tensor, (), self._size)

    # Messages.

    def send(self, tensors: Any, to: int, tag: int = 0) -> RankWork:
        """Send tensors to a rank."""
        return RankWork(self._job, self._job.send(self._member.group, self._member, to, tag, tensors), ())

    def recv(self, tensors: Any, source: int, tag: int = 0) -> RankWork:
        """Receive tensors from a rank."""
        pending = self._job.receive(self._member.group, self._member, source, tag, tensors)
        return RankWork(self._job, pending, tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RankWork:
        """Receive tensors from whoever sends some."""
        return RankWork(self._job, self._job.receive_any(self._member.group, self._member, tag, tensors), tensors)

    # What is not there.

    def _start_coalescing(self, device: Any = None) -> None:
        """Nothing: what is issued in between is posted one by one."""

    def _end_coalescing(self, device: Any = None) -> None:
        """Nothing."""

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise NotImplementedError("aiodist check cannot carry out ProcessGroup.split_group: make groups by new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise NotImplementedError("aiodist check cannot carry out ProcessGroup.merge_remote_group")
