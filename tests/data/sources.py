"""Small things that tests of datasets are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anyio.lowlevel import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Plain:
    """An iterable that can be iterated again."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class Asynchronous:
    """An async iterable that can be iterated again, and waits before each batch. Its iterators are no generators."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)
        self.left = iter(self.batches)

    def __aiter__(self) -> Asynchronous:
        return Asynchronous(self.batches)

    async def __anext__(self) -> Any:
        await checkpoint()
        for batch in self.left:
            return batch
        raise StopAsyncIteration


async def collected(dataset: Any) -> list[Any]:
    return [element async for element in dataset]


def lists(value: Any) -> list[Any]:
    """Return the components of a per-replica value as lists."""
    return [component.tolist() for component in value.values]
