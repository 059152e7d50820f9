"""Changing large variables: worker threads make the new value, and the event loop's thread puts it in place.

Assignments to a variable take effect in the order of their meetings. A replica may have issued the next one without
awaiting the last, and that one's meeting may find the new value still being made: then it waits for it, in the event
loop's thread, which nothing but such a program ever does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from aiodist._arrays.host import Array
from aiodist._arrays.leaves import Spec
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import ALL_REDUCE, Collective
from aiodist._collectives.work import Call, Work
from aiodist._strategy.aggregation import aggregate, updated
from aiodist_kernels import ReduceOp

if TYPE_CHECKING:
    from aiodist._strategy.variable import Variable


class Change:
    """What the replicas assign to a mirrored variable, on its way.

    Args:
        variable: the variable.
        method: what they called on it.
        values: what each brought.
        options: how the values are aggregated.
    """

    def __init__(self, variable: Variable, method: str, values: Sequence[Array], options: CommunicationOptions) -> None:
        self._variable = variable
        self._method = method
        self._old = variable._present()
        self._over = Event()
        self._new: Any = None
        self._error: BaseException | None = None
        op = variable.aggregation.reduce_op
        self._fresh = op is not None
        if op is not None:
            self._total = _work_of(op, values, options)
        else:
            found: list[Array] = []
            make = partial(aggregate, variable.aggregation, values, variable.name)
            self._total = Work([[lambda: found.append(make())]], found.pop)

    def work(self) -> Work:
        """Return the calls that make the new value, and what puts it in place."""
        self._variable._change = self
        phases = [[partial(self._try, call) for call in calls] for calls in self._total.phases]
        return Work([*phases, [self._make]], self._apply)

    def _try(self, call: Call) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is for those who wait)
            self._error = error

    def _make(self) -> None:
        if self._error is None:
            self._try(self._update)
        self._over.set()

    def _update(self) -> None:
        self._new = updated(self._method, self._old[0], self._total.result(), fresh=self._fresh)

    def _apply(self) -> Variable:
        """Put the new value in place, once; for the event loop's thread, when it is made.

        Raises:
            BaseException: what went wrong where it was made.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        return self._variable

    def settle(self) -> None:
        """Put the new value in place as soon as it is made."""
        self._over.wait()
        if self._variable._change is self:
            self._variable._change = None
            if self._error is None:
                self._variable._put([self._new] * len(self._old))


def _work_of(op: ReduceOp, values: Sequence[Array], options: CommunicationOptions) -> Work:
    spec = Spec((values[0].shape,), (values[0].dtype,), (None,), single=True)
    total = executor(Collective(ALL_REDUCE, op, None, spec), len(values), (), options.accumulate)
    result = total.run(values, options.bytes_per_pack)
    return result if type(result) is Work else Work([], lambda: result)


def settle(variable: Variable) -> None:
    """Have a variable's last assignment take effect."""
    if variable._change is not None:
        variable._change.settle()
