"""Small things that tests of replicas are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from aiodist import MirroredStrategy, ReplicaContext, get_replica_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def mirrored(count: int, **settings: Any) -> MirroredStrategy:
    """Return a strategy of that many replicas."""
    return MirroredStrategy([f"CPU:{k}" for k in range(count)], **settings)


def here() -> ReplicaContext:
    """Return the replica context that is current, which is not None."""
    context = get_replica_context()
    assert isinstance(context, ReplicaContext)
    return context


def replica() -> int:
    return here().replica_id_in_sync_group


async def on_each(count: int, fn: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Any, ...]:
    """Run a function on so many replicas; return what each of them returned."""
    strategy = mirrored(count, **settings)
    return strategy.experimental_local_results(await strategy.run(fn, args=args))


async def still_works(strategy: MirroredStrategy) -> None:
    """Check that a strategy serves another run."""

    async def count() -> int:
        total: int = await here().all_reduce("SUM", 1)
        return total

    assert await strategy.run(count) == strategy.num_replicas_in_sync


class Relay:
    """Lets replicas go one after the other, in an order of the test's choosing: no clock, no luck.

    Args:
        order: replica ids, by their turn.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._turns = [anyio.Event() for _ in order]
        self._turns[0].set()

    async def turn(self) -> None:
        """Wait for this replica's turn."""
        await self._turns[self._order.index(replica())].wait()

    def pass_on(self) -> None:
        """Let the next replica have its turn."""
        after = self._order.index(replica()) + 1
        if after < len(self._order):
            self._turns[after].set()
