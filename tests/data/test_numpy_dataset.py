"""Datasets over arrays: what each method makes of the elements, in the order in which they are written."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import NumpyDataset
from tests.runtime.programs import mirrored


def dataset(size: int = 10) -> NumpyDataset:
    return mirrored(2).experimental_make_numpy_dataset(np.arange(size))


def values(of: NumpyDataset) -> list[Any]:
    return [element.tolist() for element in of]


def test_what_is_prefetched_before_a_batch_counts_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._data.dataset.Prefetched", lambda _, ahead: repeat(ahead))
    assert [next(iter(of)) for of in (dataset().prefetch(5).batch(2), dataset().batch(2).prefetch(5))] == [3, 5]


def test_elements_are_copies() -> None:
    source = np.zeros((4, 2))
    for of in (NumpyDataset(source), NumpyDataset(source).batch(2)):
        next(iter(of))[...] = 1
    assert source.tolist() == np.zeros((4, 2)).tolist()


def batched(elements: list[Any], n: int, drop: bool) -> list[Any]:
    """Return lists of n consecutive elements, all of one size."""
    found = [elements[k : k + n] for k in range(0, len(elements), n)]
    for batch in found:
        if len({np.shape(element) for element in batch}) > 1:
            raise ValueError("cannot be stacked")
    return [batch for batch in found if len(batch) == n or not drop]


STAGES = st.one_of(
    st.tuples(st.just("batch"), st.integers(1, 5), st.booleans()), st.tuples(st.just("repeat"), st.integers(1, 3))
)


@given(st.integers(1, 20), st.lists(STAGES, max_size=4))
def test_batch_and_repeat_are_those_of_a_list(size: int, stages: list[Any]) -> None:
    made, wanted, text = dataset(size), list[Any](range(size)), None
    try:
        for stage, *arguments in stages:
            wanted = wanted * arguments[0] if stage == "repeat" else batched(wanted, *arguments)
    except ValueError as error:
        text = str(error)
    for stage, *arguments in stages:
        made = getattr(made, stage)(*arguments)
    if text is None:
        assert values(made) == wanted
    else:
        with pytest.raises(ValueError, match=text):
            values(made)


def test_shuffle_is_anew_at_each_iteration_and_the_same_from_the_same_seed() -> None:
    one, other = dataset(50).shuffle(7), dataset(50).shuffle(7)
    next(iter(one))  # what an iteration leaves unread makes no difference
    next(iter(other))
    first, second = values(one), values(one)
    assert first != second
    assert [values(other), values(other)] == [first, second]
    assert values(dataset(50).shuffle(8)) != values(dataset(50).shuffle(7)) == values(one.batch(50))[0]


def test_shuffle_is_anew_in_each_repetition_and_mixes_what_is_before_it() -> None:
    twice = values(dataset(50).shuffle(7).repeat(2))
    assert sorted(twice[:50]) == sorted(twice[50:])
    assert twice[:50] != twice[50:]
    mixed = values(dataset(50).repeat(2).shuffle(0))
    assert sorted(mixed) == sorted([*range(50)] * 2)
    assert len(set(mixed[:50])) < 50
    batches = values(dataset(50).batch(4).shuffle(0))
    assert batches != sorted(batches) == values(dataset(50).batch(4))


def test_endless_repeat_goes_on_unless_there_is_nothing() -> None:
    elements = iter(dataset(3).repeat())
    assert [next(elements) for _ in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert values(dataset(0).repeat()) == []
    assert values(dataset(3).batch(4, drop_remainder=True).repeat()) == []
