"""PyTorch's own DataLoader as the source of a distributed dataset."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.programs import here, mirrored

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.anyio


async def test_batches_of_a_data_loader_are_cut_and_reduced() -> None:
    inputs, targets = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)
    strategy = mirrored(3)

    async def step(batch: list[Any]) -> Any:
        x, y = batch
        assert isinstance(x, torch.Tensor)
        total = await here().all_reduce("SUM", x.sum(dim=0))
        assert isinstance(total, torch.Tensor)
        return y.to(torch.float32)

    means, sizes = [], []
    async for batch in strategy.experimental_distribute_dataset(loader):
        labels = await strategy.run(step, args=(batch,))
        sizes.append([len(part) for part in labels.values])
        means.append(float(await strategy.reduce("MEAN", labels, axis=0)))
    assert sizes == [[2, 2, 0], [2, 2, 0], [1, 1, 0]]
    assert means == [1.5, 5.5, 8.5]
