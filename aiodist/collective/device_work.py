"""Work on device arrays: enqueued at once by the last arrival, awaited without holding up the event loop.

The event loop's thread only enqueues, some microseconds for the whole nest; only where a kernel has to be compiled
first does a worker thread do both. Then the loop looks a few times whether the work is done, as small values nearly
always are, and a worker thread sleeps until it is. Results are made in each replica's own framework, on its device;
leaves that are no device arrays are worked on by the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from aiodist.collective.signature import DETAIL, STRUCTURE, TYPES, LeafMark, Signature
from aiodist.collective.work import Work
from aiodist.gpu import process
from aiodist.gpu.execute import Batch, Completion, Executor
from aiodist.gpu.moves import Move
from aiodist.gpu.plan import Job
from aiodist.vocabulary import gpus
from aiodist.vocabulary.device_arrays import DeviceArray, DeviceType, DType
from aiodist.vocabulary.options import CommunicationOptions
from aiodist_kernels.rules import Rule

Column: TypeAlias = "tuple[Any, ...]"
"""What the replicas brought of one leaf, in replica order."""


class DeviceWork:
    """The leaves of one meeting: those on devices, enqueued together, and the others.

    Kinds of collectives say what becomes of a leaf on devices, by adding reductions and moves, and of one on the host.

    Args:
        signature: what the replicas asked for, with device arrays among the leaves.
        values: what those brought that take part.
        options: how the result is to be made.
        devices: their devices, by their positions in the group.

    Raises:
        ImportError: what compiles or launches kernels is not installed.
    """

    def __init__(
        self, signature: Signature, values: Sequence[Any], options: CommunicationOptions, devices: Mapping[int, str]
    ) -> None:
        self.signature = signature
        self.options = options
        self.single = signature[STRUCTURE] is None
        self.columns: list[Column] = [tuple(values)] if self.single else list(zip(*values, strict=True))
        self.marks: Sequence[LeafMark] = [signature[TYPES]] if self.single else signature[TYPES]
        self.positions = list(devices)
        self._executor: Executor = process.executor()
        self._own = {name: gpus.logical.ordinal(name) for name in devices.values() if name.startswith("GPU:")}
        self._foreign: set[tuple[int, int]] = set()
        self._results: dict[int, list[Any]] = {}
        self._keeps: list[Any] = list(self.columns)
        self._jobs: dict[tuple[Rule, tuple[int, ...]], list[Job]] = {}
        self._moves: list[Move] = []
        for place, (mark, arrays) in enumerate(zip(self.marks, self.columns, strict=True)):
            if isinstance(mark, DeviceType):
                self._foreign |= {(array.ordinal, array.stream) for array in arrays}
                self.plan(place, mark, arrays)

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[DeviceArray]) -> None:
        """Make the results of a leaf on devices, and plan how they get their values."""
        raise NotImplementedError

    def on_host(self, place: int) -> list[Any]:
        """Return each replica's result of a leaf that is on no device."""
        raise NotImplementedError

    def detail(self, place: int) -> Any:
        """Return the axis or axes of a leaf."""
        return self.signature[DETAIL] if self.single else self.signature[DETAIL][place]

    def fresh(
        self, mark: DeviceType, shape: tuple[int, ...], dtype: DType, ordinals: Sequence[int]
    ) -> tuple[list[Any], list[DeviceArray]]:
        """Make arrays of a framework's, which live until the work is done; return them, and as they are seen."""
        made = [mark.empty(shape, dtype, ordinal) for ordinal in ordinals]
        seen = [mark.view(array) for array in made]
        self._keeps.append(made)
        self._foreign |= {(array.ordinal, array.stream) for array in seen}
        return made, seen

    def results(self, place: int, made: list[Any]) -> None:
        """Keep the results of a leaf, in replica order."""
        self._results[place] = made

    def reduce(self, rule: Rule, job: Job) -> None:
        """Add a reduction. Those that one rule makes, and that lie alike, are made together."""
        self._jobs.setdefault((rule, tuple(place.device for place in job.inputs)), []).append(job)

    def move(self, moves: Sequence[Move]) -> None:
        """Add moves, which come after all reductions."""
        self._moves += moves

    def work(self) -> Work:
        """Return what is left to do."""
        needed = self._executor.kernels(self._batches())
        driver = self._executor.driver
        if all(driver.is_loaded(device, form) for device, form in needed):
            completion = self._enqueue()
            return Work([[completion.wait]], self._collect, completion.is_done)
        return Work([[self._load_and_enqueue]], self._collect)

    def _batches(self) -> list[Batch]:
        return [Batch(rule, jobs) for (rule, _), jobs in self._jobs.items()]

    def _load_and_enqueue(self) -> None:
        driver = self._executor.driver
        with process.enqueuing, driver.using():
            for device, form in self._executor.kernels(self._batches()):
                driver.load(device, form)
        self._enqueue().wait()

    def _enqueue(self) -> Completion:
        driver = self._executor.driver
        with process.enqueuing, driver.using():
            streams = [driver.replica_stream(name, ordinal) for name, ordinal in self._own.items()]
            streams += [driver.foreign_stream(ordinal, handle) for ordinal, handle in sorted(self._foreign)]
            return self._executor.run(self._batches(), streams, self._keeps, self._moves)

    def _collect(self) -> dict[int, Any]:
        """Return each replica's result; for the event loop's thread, when the devices are done."""
        self._keeps.clear()
        by_leaf = [self._results.get(place) or self.on_host(place) for place in range(len(self.columns))]
        rows = zip(*by_leaf, strict=True)
        return {i: row[0] if self.single else list(row) for i, row in zip(self.positions, rows, strict=True)}
