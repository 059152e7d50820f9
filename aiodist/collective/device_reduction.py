"""all_reduce of device arrays: enqueued at once by the last arrival, awaited without holding up the event loop.

The event loop's thread only enqueues, some microseconds for the whole nest; only where a kernel has to be compiled
first does a worker thread do both. Then the loop looks a few times whether the work is done, as small values nearly
always are, and a worker thread sleeps until it is. Results are made in each replica's own framework, on its device;
leaves that are no device arrays are reduced on the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiodist_kernels as kernels
from aiodist.collective.handing_out import each
from aiodist.collective.reduction import reduce_leaf
from aiodist.collective.signature import OP, STRUCTURE, TYPES, LeafMark, Signature
from aiodist.collective.work import Work
from aiodist.gpu import process
from aiodist.gpu.execute import Batch, Completion, Executor
from aiodist.gpu.plan import Job, Place
from aiodist.vocabulary import gpus
from aiodist.vocabulary.device_arrays import DeviceArray, DeviceType
from aiodist_kernels import Accumulate
from aiodist_kernels.rules import Rule, rule_for


def all_reduce(signature: Signature, values: Sequence[Any], accumulate: Accumulate, devices: Mapping[int, str]) -> Work:
    """Return the work that makes each replica's result, by its position in the group.

    Args:
        signature: what the replicas asked for, with device arrays among the leaves.
        values: what they brought.
        accumulate: the accumulator.
        devices: the replicas' devices, by the positions of those that take part.

    Raises:
        ImportError: what compiles or launches kernels is not installed.
    """
    single = signature[STRUCTURE] is None
    columns = [tuple(values)] if single else list(zip(*values, strict=True))
    marks = [signature[TYPES]] if single else signature[TYPES]
    return _Reduction(signature, columns, marks, accumulate, devices, single=single).work()


class _Reduction:
    """The leaves of one meeting: those on devices, enqueued together, and the others."""

    def __init__(
        self,
        signature: Signature,
        columns: Sequence[tuple[Any, ...]],
        marks: Sequence[LeafMark],
        accumulate: Accumulate,
        devices: Mapping[int, str],
        *,
        single: bool,
    ) -> None:
        self._op = signature[OP]
        self._columns = columns
        self._marks = marks
        self._accumulate: Accumulate = accumulate
        self._single = single
        self._positions = list(devices)
        self._executor: Executor = process.executor()
        self._own = {name: gpus.logical.ordinal(name) for name in devices.values() if name.startswith("GPU:")}
        self._foreign: set[tuple[int, int]] = set()
        self._results: dict[int, list[Any]] = {}
        self._keeps: list[Any] = list(columns)
        self._batches = self._prepare()
        self._completion: Completion | None = None

    def work(self) -> Work:
        """Return what is left to do."""
        needed = self._executor.kernels(self._batches)
        driver = self._executor.driver
        if all(driver.is_loaded(device, form) for device, form in needed):
            completion = self._enqueue()
            return Work([[completion.wait]], self._collect, completion.is_done)
        return Work([[self._load_and_enqueue]], self._collect)

    def _load_and_enqueue(self) -> None:
        driver = self._executor.driver
        with process.enqueuing, driver.using():
            for device, form in self._executor.kernels(self._batches):
                driver.load(device, form)
        self._enqueue().wait()

    def _enqueue(self) -> Completion:
        driver = self._executor.driver
        with process.enqueuing, driver.using():
            streams = [driver.replica_stream(name, ordinal) for name, ordinal in self._own.items()]
            streams += [driver.foreign_stream(ordinal, handle) for ordinal, handle in sorted(self._foreign)]
            return self._executor.run(self._batches, streams, self._keeps)

    def _prepare(self) -> list[Batch]:
        """Make the results' memory, and sort the leaves by the rule that reduces them, and by where they lie.

        A replica may spread its leaves over several GPUs.
        """
        jobs: dict[tuple[Rule, tuple[int, ...]], list[Job]] = {}
        for place, (mark, arrays) in enumerate(zip(self._marks, self._columns, strict=True)):
            if isinstance(mark, DeviceType):
                rule = rule_for(self._op, arrays[0].dtype, self._accumulate)
                where = tuple(array.ordinal for array in arrays)
                jobs.setdefault((rule, where), []).append(self._job(place, mark, arrays))
        return [Batch(rule, batch) for (rule, _), batch in jobs.items()]

    def _job(self, place: int, mark: DeviceType, arrays: Sequence[DeviceArray]) -> Job:
        dtype = kernels.result_dtype(self._op, arrays[0].dtype)
        results = [mark.empty(array.shape, dtype, array.ordinal) for array in arrays]
        seen = [mark.view(result) for result in results]
        self._results[place] = results
        self._keeps.append(results)
        self._foreign |= {(array.ordinal, array.stream) for array in (*arrays, *seen)}
        return Job(
            tuple(Place(array.ordinal, array.address) for array in arrays),
            tuple(Place(array.ordinal, array.address) for array in seen),
            arrays[0].size,
            arrays[0].dtype.itemsize,
            dtype.itemsize,
        )

    def _collect(self) -> dict[int, Any]:
        """Return each replica's result; for the event loop's thread, when the devices are done."""
        self._keeps.clear()
        count = len(self._columns[0])
        by_leaf = [self._results.get(place) or self._on_host(place, count) for place in range(len(self._columns))]
        rows = zip(*by_leaf, strict=True)
        return {i: row[0] if self._single else list(row) for i, row in zip(self._positions, rows, strict=True)}

    def _on_host(self, place: int, count: int) -> list[Any]:
        mark = self._marks[place]
        return each(mark, reduce_leaf(self._op, self._columns[place], mark, self._accumulate), count)
