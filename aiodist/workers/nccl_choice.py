"""Whether values of several workers go through NCCL, and which: the whole choice stands here.

**Whether**: every worker tells, at the strategy's making, what it has (`Offer`), and all of them judge alike by all
offers (`why_not`). Each worker needs a GPU of its own for its first replica, NCCL in one version for all, and options
that leave it open. Two workers on one GPU, or on parts of one, would wait for each other inside of it for ever.

**When**: a run that has its GPU to itself, on every worker (`nccl_plane`). What NCCL launches occupies a GPU until all
workers have launched the same, and two runs may come to that in another order on each.

**Which** (`takes`): what NCCL reduces with aiodist's meaning, in the accumulator that aiodist uses for it.

| accumulator | SUM, MEAN | PRODUCT | MIN, MAX |
|---|---|---|---|
| float32, float64 | yes | yes | no: NCCL takes fmin and fmax, which drop a NaN |
| complex64, complex128 | yes, by component | no such type | |
| 8, 32, 64 bits of integer | yes, wraps | yes, wraps | yes |
| 16 bits of integer | no such type | no such type | no such type |
| bool | | | yes, as bytes |

That holds for all_reduce and for reduce_scatter, which is the same until each replica takes its part. A broadcast moves
bytes, of every dtype. Other kinds go through the host: what a worker sends in them depends on sizes that only the
record tells, or is another for each worker. So do groups: their steps are of other lanes, and workers come to those in
another order, each, than to the run's; what is given to NCCL must be in one.

float16 and bfloat16 accumulate in float32, and NCCL never sees them: it would round after every addition. A mean is
summed by NCCL, and divided by a kernel of aiodist's. What fits into the record is there before NCCL would have begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from aiodist.collective.signature import DTYPES, KIND, OP, SHAPES, STRUCTURE, TYPES, Signature
from aiodist.gpu import nccl
from aiodist.vocabulary import gpus
from aiodist.vocabulary.device_arrays import DeviceType, DType
from aiodist.vocabulary.options import CommunicationOptions
from aiodist.workers.layout import Layout
from aiodist.workers.record import PAYLOAD
from aiodist_kernels import ReduceOp
from aiodist_kernels.rules import rule_for

_NUMBERS: Final = frozenset(["float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"])


class Offer(NamedTuple):
    """What a worker has of NCCL.

    Attributes:
        implementation: the option of its strategy.
        version: of NCCL.
        gpu: tells its first replica's GPU from every other.
        missing: why it cannot use it, for a person; empty where it can.
    """

    implementation: str
    version: str = ""
    gpu: str = ""
    missing: str = ""


def offer(device: str, options: CommunicationOptions) -> Offer:
    """Return this worker's offer.

    Args:
        device: its first replica's.
        options: of its strategy.
    """
    implementation = options.implementation
    if implementation == "ring":
        return Offer(implementation, missing="has implementation='ring'")
    if options.reduction == "ordered":
        return Offer(implementation, missing="has reduction='ordered', whose order of additions NCCL does not keep")
    if not device.startswith("GPU:"):
        return Offer(implementation, missing=_no_gpu(device))
    try:
        version = nccl.library().version
    except ImportError as error:
        return Offer(implementation, missing=f"has no NCCL: {error}")
    ordinal = gpus.logical.ordinal(device)
    gpu = next(gpu for gpu in gpus.find().gpus if gpu.ordinal == ordinal)
    return Offer(implementation, version, gpu.uuid)


def why_not(offers: Sequence[Offer | None], layout: Layout) -> str | None:
    """Return why these workers do not use NCCL, the same on each; None where they do.

    Args:
        offers: by worker; None from one that has no GPU for its first replica, and does not demand NCCL.
        layout: the workers.

    Raises:
        RuntimeError: one of them demands it.
    """
    given = [offer or Offer("auto", missing=_no_gpu(layout.devices[rank][0])) for rank, offer in enumerate(offers)]
    reason = _obstacle(given)
    demanding = [rank for rank, offer in enumerate(given) if offer.implementation == "nccl"]
    if reason is not None and demanding:
        raise RuntimeError(
            f"worker {demanding[0]} has implementation='nccl', and NCCL cannot be used: {reason}. Leave the option "
            "out, and arrays on GPUs go through NCCL where they can, and else through the host"
        )
    return reason


def _no_gpu(device: str) -> str:
    return f"has its first replica on {device}, where NCCL needs a GPU"


def _obstacle(offers: Sequence[Offer]) -> str | None:
    owners: dict[str, int] = {}
    for rank, each in enumerate(offers):
        if each.missing:
            return f"worker {rank} of {len(offers)} {each.missing}"
        if each.version != offers[0].version:
            return f"worker 0 has NCCL {offers[0].version}, and worker {rank} has {each.version}"
        other = owners.setdefault(each.gpu, rank)
        if other != rank:
            return f"workers {other} and {rank} share a GPU, where NCCL needs one for each"
    return None


@lru_cache(maxsize=1024)
def takes(op: ReduceOp, dtype: DType) -> bool:
    """Return whether NCCL reduces such numbers with aiodist's meaning."""
    accumulator = rule_for(op, dtype).accumulator
    if op in {ReduceOp.MIN, ReduceOp.MAX}:
        return accumulator.kind == "b" or (accumulator.kind in "iu" and accumulator.name in _NUMBERS)
    if accumulator.kind == "c":
        return op is not ReduceOp.PRODUCT
    return accumulator.name in _NUMBERS


def places_for(signature: Signature) -> Sequence[int]:
    """Return the places of the leaves of a collective that go through NCCL; none where they would not be worth it."""
    kind = signature[KIND].name
    if kind not in {"all_reduce", "reduce_scatter", "broadcast"}:
        return ()
    single = signature[STRUCTURE] is None
    fields = (signature[SHAPES], signature[DTYPES], signature[TYPES])
    leaves = [fields] if single else list(zip(*fields, strict=True))
    found = [
        place
        for place, (_, dtype, mark) in enumerate(leaves)
        if isinstance(mark, DeviceType) and (kind == "broadcast" or takes(signature[OP], dtype))
    ]
    nbytes = sum(_nbytes(*leaves[place][:2]) for place in found)
    return found if nbytes > PAYLOAD else ()


def _nbytes(shape: tuple[int, ...], dtype: DType) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count
