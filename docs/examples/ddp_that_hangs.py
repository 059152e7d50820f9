"""DistributedDataParallel on three ranks, broken on purpose: a rank that finds a bad batch skips the step.

torchrun --nproc-per-node 3 docs/examples/ddp_that_hangs.py        hangs at the end
aiodist check --ranks 3 docs/examples/ddp_that_hangs.py            says at once where the ranks diverge
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets; one of them is broken."""
    features = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
    if (rank, step) == (1, 3):
        features[0, 0] = float("nan")
    return features, features.nan_to_num().sum(1, keepdim=True)


def train() -> None:
    """Train for a few steps; rank 0 prints a line when all have finished."""
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        features, targets = batch(dist.get_rank(), step)
        if features.isnan().any():
            continue  # the other ranks do not know
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        print("every rank is done: now the model is saved")


def dump_after(seconds: float) -> None:
    """Write this rank's flight recorder dump after a while, as NCCL's watchdog does on its own."""

    def dump() -> None:
        recorded = torch._C._distributed_c10d._dump_fr_trace()  # noqa: SLF001  (no public name gives it)
        Path(f"dump_{dist.get_rank()}").write_bytes(recorded)
        os._exit(1)

    threading.Timer(seconds, dump).start()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if "DUMP_AFTER" in os.environ:
        dump_after(float(os.environ["DUMP_AFTER"]))
    train()
    dist.destroy_process_group()
