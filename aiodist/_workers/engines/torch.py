"""The torch engine, for programs started by torchrun: torch.distributed's public names, over gloo.

Gathering parts of several sizes, which gloo lacks, is composed of broadcasts. Gloo does the reductions that have the
same meaning as aiodist's; the others are split into shares, as with any engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np

from aiodist._workers.transport import Array, Communicator, Parts, Request, Serial, Steps, abandoned, in_thread
from aiodist_kernels import ReduceOp

INSTALL: Final = "torchrun has started this process, so its workers need PyTorch: pip install 'aiodist[torch]'"
_HOLD_SECONDS: Final = 2.0
"""How long an error of the engine is held back: if a worker has died, the control connection says so meanwhile."""


def load_torch() -> tuple[ModuleType, ModuleType]:
    """Return torch and torch.distributed."""
    try:
        import torch
        import torch.distributed as dist  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(INSTALL) from error
    if not dist.is_available() or not dist.is_gloo_available():
        raise ImportError("this PyTorch is built without torch.distributed or without gloo, which workers need")
    return torch, dist


class TorchRequest:
    """Operations of torch that complete together, with their buffers, and a function to call then."""

    def __init__(self, works: Sequence[Any], *buffers: object, finish: Callable[[], object] | None = None) -> None:
        self._works = list(works)
        self._buffers = buffers
        self._finish = finish
        self._failed_at: float | None = None

    def test(self) -> bool:
        """Return whether they are complete."""
        while self._works and self._works[0].is_completed():
            try:
                self._works[0].wait()
            except RuntimeError:
                now = time.monotonic()
                self._failed_at = self._failed_at or now
                if now - self._failed_at < _HOLD_SECONDS:
                    return False
                raise
            del self._works[0]
        if not self._works and self._finish is not None:
            self._finish()
            self._finish = None
        return not self._works

    def __del__(self) -> None:
        """Keep buffers alive that torch may still read and write, if nobody waits for the request any more."""
        if self._works and self._failed_at is None:
            abandoned.append(self)


class TorchCommunicator(Communicator):
    """Workers connected by torch.distributed."""

    engine = "torch"

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self._torch, self._dist = load_torch()
        self._group = group
        self._ranks = list(ranks)
        self._dup_calls = Serial()  # not in one order with those for groups
        self._group_calls = Serial()
        ops = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
        self._ops = {op: getattr(self._dist.ReduceOp, op.name) for op in ops}
        self.library = f"torch {self._torch.__version__}"
        self.rank = self._ranks.index(self._dist.get_rank())
        self.size = len(self._ranks)

    @classmethod
    def of_world(cls) -> Steps[Communicator]:
        """Make a communicator of all processes; initialise torch.distributed unless the program has."""
        _, dist = load_torch()
        if not dist.is_initialized():
            yield from in_thread(dist.init_process_group, "gloo")
        return (yield from cls(None, range(dist.get_world_size())).dup())

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether gloo's op has aiodist's meaning for a dtype."""
        return dtype.char in ("fdil" if op in (ReduceOp.SUM, ReduceOp.PRODUCT) else "il")

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> Request:
        if receive is not send:
            receive[...] = send
        if not receive.size:
            return TorchRequest([])
        tensor = self._torch.from_numpy(receive)
        return TorchRequest([self._dist.all_reduce(tensor, self._ops[op], self._group, async_op=True)], receive)

    def iallgather(self, send: Array, receive: Array) -> Request:
        if not receive.size:
            return TorchRequest([])
        parts = [self._torch.from_numpy(part) for part in receive.reshape(self.size, -1)]
        own = self._readable(send)
        return TorchRequest([self._dist.all_gather(parts, own, self._group, async_op=True)], own, receive)

    def iallgatherv(self, send: Array, receive: Parts) -> Request:
        parts = receive.views()
        parts[self.rank][...] = send
        works = [self._broadcast(part, root) for root, part in enumerate(parts) if part.size]
        return TorchRequest(works, receive)

    def ibcast(self, buffer: Array, root: int) -> Request:
        return TorchRequest([self._broadcast(buffer, root)] if buffer.size else [], buffer)

    def _broadcast(self, buffer: Array, root: int) -> Any:
        return self._dist.broadcast(self._readable(buffer), self._ranks[root], self._group, async_op=True)

    def ialltoallv(self, send: Parts, receive: Parts) -> Request:
        source, target = np.concatenate(send.views()), np.empty(sum(receive.counts), np.uint8)
        work = self._dist.all_to_all_single(
            self._torch.from_numpy(target), self._torch.from_numpy(source), list(receive.counts), list(send.counts),
            self._group, async_op=True,
        )  # fmt: skip

        def scatter() -> None:
            for part, received in zip(receive.views(), Parts(target, receive.counts).views(), strict=True):
                part[...] = received

        return TorchRequest([work], source, target, finish=scatter)

    def dup(self) -> Steps[Communicator]:
        return self._dup_calls.call(self._new_group, self._ranks)

    def create_group(self, ranks: Sequence[int], tag: int) -> Steps[Communicator]:  # noqa: ARG002  (torch needs none)
        return self._group_calls.call(self._new_group, [self._ranks[rank] for rank in ranks])

    def _new_group(self, ranks: list[int]) -> Communicator:
        group = self._dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return TorchCommunicator(group, ranks)

    def _readable(self, array: Array) -> Any:
        """Return a tensor of the same memory, or of a copy if that is read-only, which torch does not support."""
        return self._torch.from_numpy(array if array.flags.writeable else array.copy())
