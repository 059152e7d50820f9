"""The local engine: one worker. Every operation is complete at once; the code above it is the same as for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiodist._workers.transport import DONE, Array, Done, Request
from aiodist_kernels import ReduceOp


class LocalCommunicator:
    """The only worker of its job."""

    engine = library = "local"
    rank = 0
    size = 1
    depth = 1

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:  # noqa: ARG002  (there is nothing to reduce with)
        """Return that it takes anything."""
        return True

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> Request:  # noqa: ARG002
        """Copy."""
        if receive is not send:
            receive[:] = send
        return DONE

    def iallgather(self, send: Array, receive: Array) -> Request:
        """Copy."""
        receive[:] = send
        return DONE

    def iallgatherv(
        self,
        send: Array,
        receive: Array,
        counts: Sequence[int],  # noqa: ARG002
        places: Sequence[int] | None = None,
    ) -> Request:
        """Copy."""
        begin = 0 if places is None else places[0]
        return self.iallgather(send, receive[begin : begin + len(send)])

    def ibcast(self, buffer: Array, root: int) -> Request:  # noqa: ARG002
        """Leave the buffer as it is."""
        return DONE

    def ialltoallv(
        self,
        send: Array,
        send_counts: Sequence[int],
        receive: Array,
        receive_counts: Sequence[int],
        send_places: Sequence[int] | None = None,
        receive_places: Sequence[int] | None = None,
    ) -> Request:
        """Copy."""
        begin = 0 if send_places is None else send_places[0]
        return self.iallgatherv(send[begin : begin + send_counts[0]], receive, receive_counts, receive_places)

    def idup(self) -> LocalMaking:
        """Return another one."""
        return LocalMaking()

    def icreate_group(self, ranks: Sequence[int], tag: int) -> LocalMaking:  # noqa: ARG002
        """Return another one: there is one worker to choose from."""
        return LocalMaking()

    def abort(self) -> None:
        """Do nothing: nothing is ever under way."""


class LocalMaking(Done):
    """Another local communicator."""

    def result(self) -> LocalCommunicator:
        """Return it."""
        return LocalCommunicator()
