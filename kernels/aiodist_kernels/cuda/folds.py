# SPDX-License-Identifier: Apache-2.0
"""The fold of one vector of lanes, written once for the compiler and for the simulator."""

from collections.abc import Sequence
from typing import Any, Protocol


class Machine(Protocol):
    """What a fold runs on: it loads, folds and stores `width` lanes at a time.

    `compiled.Emitter` writes LLVM instructions, `simulated.Memory` computes with NumPy. Addresses, indices and values
    are the machine's own.
    """

    def load(self, address: Any, index: Any) -> Any:
        """Load the lanes from `index` on of the buffer at `address`, widened to the accumulator."""

    def fold(self, total: Any, value: Any) -> Any:
        """Take one step of the fold."""

    def finish(self, total: Any, count: Any) -> Any:
        """Scale or divide by the number of buffers, and round to the result."""

    def store(self, address: Any, index: Any, value: Any) -> None:
        """Store lanes of the result from `index` on at `address`."""


def fold_all(machine: Machine, addresses: Sequence[Any], index: Any, total: Any = None) -> Any:
    """Fold the same lanes of all buffers in their order, on top of `total` if there is one."""
    values = [machine.load(address, index) for address in addresses]  # all in flight before the first is needed
    for value in values:
        total = value if total is None else machine.fold(total, value)
    return total


def reduce_all(machine: Machine, out: Any, addresses: Sequence[Any], index: Any, count: Any) -> None:
    """Reduce the same lanes of all buffers into those of `out`; they may be the same memory."""
    machine.store(out, index, machine.finish(fold_all(machine, addresses, index), count))
