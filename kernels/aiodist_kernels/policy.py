# SPDX-License-Identifier: Apache-2.0
"""Which tier serves, when stores go past the caches, when threads pay: all measured thresholds.

They were measured on two cores of a server with 2 MiB of second-level cache each, by
`tests/benchmarks/cpu_reductions.py`; docs/benchmarks/cpu-reductions.md has the figures. Bytes are those of
one buffer unless a name says otherwise.
"""

from typing import Final

from aiodist_kernels.rules import Finish, Rule

KIB: Final = 1024
MIB: Final = 1024 * KIB

NEVER: Final = 1 << 62
"""More bytes than any buffer has."""

PLAIN_BELOW: Final = 2 * MIB
"""Bytes below which a fold in the buffers' own dtype is its ufunc alone, called from buffer to buffer, unless a kernel
is quicker, with memory from the C library also for two arrays of 1 MiB: what a sum reads and writes has by then put the
interpreter out of the caches, so that to borrow a block takes 6 microseconds of 105. (`pool` has its own thresholds for
results that are larger, or come with others.)"""

SMALL_TO: Final = 256 * KIB - 1
"""Bytes up to which the kernel serves that reads a list of arrays itself, with the interpreter's lock held: below, it
is the call that counts, which costs it a tenth of a microsecond for any number of buffers."""

COPIED_TO: Final = 4 * KIB
"""Bytes up to which to copy an array is a quicker way to memory for another one like it than to ask for that."""

NATIVE_FROM: Final = {2: 32 * MIB, 3: 512 * KIB, 4: 128 * KIB, 5: 64 * KIB, 17: 512 * KIB}
"""Folds in the buffers' own dtype, by the number of buffers (an entry holds up to the next). NumPy
adds two buffers at the limit of the machine, until stores should go past the caches; from three on it
passes over the result again and again."""

WIDE_FROM: Final = 2 * KIB
"""Folds in a wider accumulator, where NumPy converts each buffer apart."""

STREAMING_FROM: Final = 32 * MIB
"""Results from this size on are stored past the caches: the reader that follows would not find them
there anyway, and the memory they replace need not be read first."""

BLOCKING_FROM_MOVED: Final = 4 * MIB
"""Bytes moved by one reduction from which an event loop's thread should not do it: a hop to a
worker thread costs 30 to 70 microseconds."""

THREADS_FROM_MOVED: Final = 16 * MIB
"""Bytes moved from which a second worker thread pays."""

LEAST_MOVED_BY_A_THREAD: Final = 4 * MIB
"""Bytes that each worker thread should have to move, at least."""

SLOWNESS_OF_HALF_FLOATS: Final = 16
"""How many times longer than others NumPy takes for the bytes of float16 and bfloat16."""

SLOWNESS_BY_ROWS: Final = 8
"""How many times longer than a dense reduction one by row index takes for its bytes."""


def compiled_from(rule: Rule, count: int) -> int:
    """Return the bytes of one buffer from which a compiled kernel beats NumPy."""
    if rule.accumulator != rule.dtype or rule.finish is not Finish.NOTHING:
        return WIDE_FROM
    if rule.dtype.itemsize == 2 and rule.dtype.kind not in "iu":  # MIN and MAX, which NumPy takes one by one
        return WIDE_FROM
    return NATIVE_FROM[max(least for least in NATIVE_FROM if least <= max(count, 2))]


def streams(result_bytes: int) -> bool:
    """Say whether a result of so many bytes is stored past the caches."""
    return result_bytes >= STREAMING_FROM


def blocks(moved: int) -> bool:
    """Say whether moving so many bytes is too much for an event loop's thread."""
    return moved >= BLOCKING_FROM_MOVED


def parts(moved: int, workers: int) -> int:
    """Return into how many pieces to cut a reduction that moves so many bytes."""
    if moved < THREADS_FROM_MOVED:
        return 1
    return max(1, min(workers, moved // LEAST_MOVED_BY_A_THREAD))
