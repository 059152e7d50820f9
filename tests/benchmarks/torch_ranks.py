"""The programs of tests/faults on torch.distributed: a context with the same calls, and a process for each rank."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Generator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import numpy as np

from aiodist import ReduceOp
from tests.faults.case import REPLICAS, Case

Outcomes = dict[int, str | None]
"""By rank, the message of the exception that it raised, or None if it returned; a rank that hangs is missing."""

TIMEOUT_SECONDS = 3.0
HANGS_AFTER_SECONDS = 12.0


class _Pending:
    """A collective in flight; awaiting it gives the result as NumPy has it."""

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work = work
        self._finish = finish

    def __await__(self) -> Generator[Any, Any, Any]:
        if self._work is not None:
            self._work.wait()
        return self._finish()
        yield


class TorchContext:
    """Those calls of a replica context that torch has, too."""

    def __init__(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self.replica_id_in_sync_group = rank
        self.num_replicas_in_sync = REPLICAS

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, *, name: str | None = None) -> _Pending:
        op = ReduceOp[reduce_op.upper()] if isinstance(reduce_op, str) else reduce_op
        tensor = self._tensor(value)
        native = getattr(self._dist.ReduceOp, "SUM" if op is ReduceOp.MEAN else op.name)
        work = self._dist.all_reduce(tensor, native, async_op=True)

        def finish() -> Any:
            if op is ReduceOp.MEAN:
                return tensor.numpy() / self.num_replicas_in_sync
            return tensor.numpy() if isinstance(value, np.ndarray) else tensor.item()

        return _Pending(work, finish)

    def broadcast(self, value: Any, source: int = 0) -> _Pending:
        tensor = self._tensor(value)
        return _Pending(self._dist.broadcast(tensor, source, async_op=True), tensor.numpy)

    def all_gather(self, value: Any, axis: int) -> _Pending:
        tensor = self._tensor(value)
        parts = [self._torch.empty_like(tensor) for _ in range(self.num_replicas_in_sync)]
        work = self._dist.all_gather(parts, tensor, async_op=True)
        return _Pending(work, lambda: self._torch.cat(parts, axis).numpy())

    def barrier(self) -> _Pending:
        return _Pending(self._dist.barrier(async_op=True), lambda: None)

    def _tensor(self, value: Any) -> Any:
        return self._torch.from_numpy(np.array(value, order="C"))


def outcomes(case: Case) -> Outcomes:
    """Run a program on every rank and return how each ended; kill those that hang."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", __name__])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(REPLICAS):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (case.program, rank, sender, f"{folder}/store")
            process = context.Process(target=_process, args=arguments, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _received(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(pipes: list[Connection]) -> Outcomes:
    """Return what the ranks report within the time."""
    said: Outcomes = {}
    deadline = monotonic() + HANGS_AFTER_SECONDS
    while pipes and len(said) < REPLICAS and (left := deadline - monotonic()) > 0:
        for pipe in wait(pipes, left):
            assert isinstance(pipe, Connection)
            try:
                rank, message = pipe.recv()
                said[rank] = message
            except EOFError:
                pipes.remove(pipe)
    return said


def _process(program: Callable[..., Any], rank: int, sender: Connection, store: str) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    import torch.distributed as dist

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", f"file://{store}", limit, world_size=REPLICAS, rank=rank)
    message = None
    try:
        asyncio.run(program(TorchContext(rank)))
    except Exception as error:  # noqa: BLE001  (whatever torch raises is the outcome)
        message = f"{type(error).__name__}: {error}"
    sender.send((rank, message))
    os._exit(0)  # a failed group may block the ordinary end of its process
