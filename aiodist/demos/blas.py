"""One thread a replica for matrix products."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


def one_thread_each() -> AbstractContextManager[object]:
    """Keep BLAS to the calling thread inside the block.

    Every replica has a worker thread already. When each product of each of them is cut up for all cores once more, the
    pieces wait for each other: 2 to 8 times slower on 2 cores. Without threadpoolctl nothing changes but the speed.
    """
    try:
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
