"""``out=``: what is no buffer for a result is refused at the call; results get into the others, whatever overlaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist._collectives import kinds, out
from aiodist._collectives.kinds import Collective
from aiodist._collectives.out import Span, entangled, span
from aiodist_kernels import ReduceOp
from tests.collectives.reference import spec_of


def asked(value: Any, op: ReduceOp = ReduceOp.SUM) -> Collective:
    return Collective(kinds.ALL_REDUCE, op, None, spec_of(value))


@pytest.mark.parametrize(
    ("buffers", "match"),
    [
        ([np.zeros(4)] * 2, "a buffer of its own for each leaf"),
        ([(whole := np.zeros(8))[:4], whole[4:]], None),
        ([(whole := np.zeros(7))[:4], whole[3:]], "a buffer of its own for each leaf"),
        ([(whole := np.zeros(8))[::2], whole[1::2]], None),
        ([np.lib.stride_tricks.as_strided(np.zeros(4), (4,), (0,)), np.zeros(4)], "whose elements overlap"),
        ([np.lib.stride_tricks.as_strided(np.zeros(4), (4,), (4,)), np.zeros(4)], "whose elements overlap"),
        ([np.zeros(8)[::-2], np.zeros((4, 5))[:, 2]], None),
    ],
    ids=["one for two", "halves", "overlap", "interleaved", "one element", "half an element", "any strides"],
)
def test_each_element_has_memory_of_its_own(buffers: list[np.ndarray], match: str | None) -> None:
    value = [np.ones(4), np.ones(4)]
    if match is None:
        assert out.checked(asked(value), value, buffers) == buffers
        return
    with pytest.raises(ValueError, match=match):
        out.checked(asked(value), value, buffers)


@pytest.mark.parametrize(
    ("value", "buffer", "error", "match"),
    [
        (np.ones(3), [1.0, 2.0, 3.0], TypeError, "got an object of type builtins.list"),
        (np.ones(3), 1.0, TypeError, "out must hold arrays, where the value has arrays"),
        (2.5, np.zeros(()), TypeError, "out must hold arrays, where the value has arrays"),
        (np.ones(3), np.zeros(3, np.float32), TypeError, "the result's dtype float64, got float32"),
        (np.ones(3), np.zeros((3, 1)), ValueError, r"the result's shape \(3,\), got \(3, 1\)"),
        (np.ones(3), np.broadcast_to(np.zeros(()), 3), ValueError, "out must be writeable"),
    ],
)
def test_what_is_no_buffer_for_the_result(value: Any, buffer: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        out.checked(asked(value), [value], [buffer])


def test_what_is_entangled() -> None:
    memory = np.zeros(20)
    a, b, c = memory[:5], memory[5:10], memory[10:15]

    def tangled(columns: list[list[np.ndarray]], targets: list[np.ndarray]) -> bool:
        inputs = {span(array, leaf) for leaf, column in enumerate(columns) for array in column}
        outs = [span(array, leaf) for leaf, array in enumerate(targets)]
        return entangled(inputs.difference(outs), outs)

    assert not tangled([[a, a], [b, b]], [a, b])
    assert not tangled([[a, b], [a, b]], [c, memory[15:]])
    assert tangled([[a, a], [b, b]], [b, c])
    assert tangled([[a, a], [b, b]], [c, memory[4:9]])
    assert tangled([[a, a], [b, b]], [c, memory[12:17]])
    assert tangled([[a, a], [b, a]], [a, b])
    assert tangled([[a, a]], [memory[3:8]])
    assert not tangled([[a, a]], [a])
    assert not tangled([[a], [a[:0]]], [a, a[:0]])
    assert entangled([Span(0, 20, 0)], [Span(0, 20, 0)])
    assert entangled([], [Span(0, 20, 0), Span(0, 20, 0)])
    assert entangled([Span(0, 100, 0), Span(20, 40, 1)], [Span(40, 60, 2)])
