# SPDX-License-Identifier: Apache-2.0
"""Large reductions: their memory, and their cut into pieces that worker threads may run.

Each piece reduces a range of elements of all buffers, so the bits do not depend on how many
there are. Pieces release the interpreter's lock while they work.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from aiodist_kernels import compiled_tier, numpy_tier
from aiodist_kernels.arguments import Array
from aiodist_kernels.compiled_tier import Kernel, Range
from aiodist_kernels.layout import empty_like, flat_views, same_order, spoils
from aiodist_kernels.plans import Plan
from aiodist_kernels.quiet import quietly

GRAIN: Final = 4096
"""Elements to whose multiples pieces are cut, so that two threads never share a cache line."""


class Pieces(NamedTuple):
    """One reduction, ready to be run.

    Attributes:
        result: is complete when all `calls` have returned.
        calls: what to run, in any order and in any threads, each once.
    """

    result: Array
    calls: tuple[Callable[[], object], ...]


def cut(plan: Plan, buffers: Sequence[Array], out: Array | None, parts: int) -> Pieces:
    """Cut a reduction, whose arguments are checked, into at most `parts` pieces of equal size."""
    target = empty_like(buffers[0], plan.rule.result) if out is None else out
    kernel = plan.kernel(len(buffers), buffers[0].nbytes)
    run = compiled_range(kernel, plan, buffers, target) or _numpy_range(plan, buffers, target)
    if run is None:
        return Pieces(target, (lambda: quietly(plan.fold, plan.rule, buffers, target),))
    size = buffers[0].size
    step = max(GRAIN, -(-size // max(parts, 1) // GRAIN) * GRAIN)
    starts = range(0, size, step)
    held = (*buffers, target)
    return Pieces(target, tuple(partial(_run, run, start, min(start + step, size), held) for start in starts))


def compiled_range(kernel: Kernel | None, plan: Plan, buffers: Sequence[Array], target: Array) -> Range | None:
    """Return what reduces a range of elements on the compiled tier.

    Returns:
        None where there is no kernel, or where the layouts do not allow it.
    """
    if kernel is None or not same_order([*buffers, target]):
        return None
    return compiled_tier.bind(kernel, plan.rule, buffers, target)


def _numpy_range(plan: Plan, buffers: Sequence[Array], target: Array) -> Range | None:
    flats = flat_views([*buffers, target])
    if flats is None or spoils(target, buffers) or (plan.rule.contiguous and buffers[0].dtype != plan.rule.dtype):
        return None
    return partial(numpy_tier.fold_range, plan.rule, flats[:-1], flats[-1])


def _run(run: Range, start: int, stop: int, _held: tuple[Array, ...]) -> None:
    """Run one piece. A kernel knows addresses alone: the call holds what lies there."""
    quietly(run, start, stop)
