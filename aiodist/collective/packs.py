"""Packs: runs of consecutive leaves that are reduced as one unit, by TensorFlow's rule for ``bytes_per_pack``.

A pack closes when it has more bytes than were asked for: so packs are few and large rather than many and small. With 0,
or where the size of a leaf is not known, all leaves are one pack.
"""

from __future__ import annotations

from collections.abc import Sequence


def packs(sizes: Sequence[int | None], bytes_per_pack: int) -> list[range]:
    """Return the places of the leaves of each pack, in their order.

    Args:
        sizes: the bytes of each leaf; None where they are not known, as of `IndexedSlices`.
        bytes_per_pack: from 0.
    """
    if bytes_per_pack == 0 or not sizes or None in sizes:
        return [range(len(sizes))]
    starts: list[int] = []
    held = 0
    for place, size in enumerate(sizes):
        if not starts or held > bytes_per_pack:
            starts.append(place)
            held = 0
        held += size or 0
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
