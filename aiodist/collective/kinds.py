"""The kinds of collectives: for each what must differ to be an error of its own, what it accepts, what it computes.

A kind's functions see signatures and values only: nothing here knows of replicas' tasks, handles or event loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiodist._arrays.options import CommunicationOptions
from aiodist._core.report import Reason
from aiodist.collective import exchange, reduction
from aiodist.collective.all_reduce import all_reduce
from aiodist.collective.signature import KIND, Signature
from aiodist.workers import crossing
from aiodist.workers.crossing import Crossing

if TYPE_CHECKING:
    from aiodist.collective.brought import Brought
    from aiodist.collective.device_work import DeviceWork


def _accept(signature: Signature, size: int) -> None:
    """Accept anything."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of collective.

    Attributes:
        name: as it is called on a replica context.
        detail: what the signature's detail is, and so what is wrong when that differs.
        combine: from signature, the replicas' values in replica order and the options, to the result,
            or the `Work` that it takes; None where a function of the user's makes it.
        shared: one result serves all replicas; else there is one for each.
        check: raises TypeError or ValueError when a signature cannot be carried out by that many replicas.
        on_devices: the same as ``combine``, where arrays on GPUs are among the values, see `DeviceWork`; None where
            there are no values.
        across: plans how it crosses to other workers; None where a function of the user's makes the result.
        token: tells kinds of one name apart, where several processes must agree on which is meant.
    """

    name: str
    detail: Reason
    combine: Callable[[Signature, list[Any], CommunicationOptions], Any] | None
    shared: bool = True
    check: Callable[[Signature, int], None] = _accept
    on_devices: Callable[..., DeviceWork] | None = None
    across: Crossing | None = None
    token: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return self.name


def _on_devices(brought: Brought, *others: Any) -> DeviceWork:
    from aiodist.collective.device_exchange import WORK  # loaded where there are arrays on GPUs

    return WORK[brought.signature[KIND].name](brought, *others)


ALL_REDUCE = Kind(
    "all_reduce",
    Reason.AXIS,
    all_reduce,
    check=reduction.check,
    on_devices=_on_devices,
    across=crossing.all_reduce,
)
ALL_GATHER = Kind(
    "all_gather",
    Reason.AXIS,
    exchange.all_gather,
    check=exchange.check,
    on_devices=_on_devices,
    across=crossing.all_gather,
)
BROADCAST = Kind(
    "broadcast",
    Reason.SOURCE,
    exchange.broadcast,
    check=exchange.check_source,
    on_devices=_on_devices,
    across=crossing.broadcast,
)
REDUCE_SCATTER = Kind(
    "reduce_scatter",
    Reason.AXIS,
    exchange.reduce_scatter,
    shared=False,
    check=exchange.check_reduce_scatter,
    on_devices=_on_devices,
    across=crossing.reduce_scatter,
)
ALL_TO_ALL = Kind(
    "all_to_all",
    Reason.AXIS,
    exchange.all_to_all,
    shared=False,
    check=exchange.check_all_to_all,
    on_devices=_on_devices,
    across=crossing.all_to_all,
)
BARRIER = Kind("barrier", Reason.AXIS, exchange.barrier, across=crossing.barrier)
NEW_GROUP = Kind("new_group", Reason.AXIS, exchange.barrier, across=crossing.barrier)
MERGE_CALL = Kind("merge_call", Reason.MERGE_FN, None, shared=False)
