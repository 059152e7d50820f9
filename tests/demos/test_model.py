"""The language model: gradients against finite differences, what it writes, and the text that it learns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest

from aiodist._demos.corpus import build, load_topics, windows, without_repeats
from aiodist._demos.model import LanguageModel, Weights, cross_entropy

RNG = np.random.default_rng(2)
MODEL = LanguageModel(symbols=5, context=3, width=2, hidden=(6, 4))
INPUTS, TARGETS = RNG.integers(0, 5, (9, 3)), RNG.integers(0, 5, 9)
LOGITS = RNG.normal(size=(9, 5))


@pytest.fixture
def weights() -> Weights:
    """Return weights in float64, where differences of 1e-6 can be told, and off the rectifiers' kinks.

    With biases of zero a unit whose inputs are all cut off stands exactly at its kink, where there is no derivative.
    """
    rng = np.random.default_rng(9)
    first = MODEL.init(np.random.default_rng(0))
    return {name: weight + 0.1 * rng.standard_normal(weight.shape) for name, weight in first.items()}


def numerical_gradients(loss: Callable[[], float], weights: Weights, by: float = 1e-6) -> Weights:
    """Return (loss(w + by) - loss(w - by)) / (2 by) for every element of every weight."""
    gradients = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        for index in np.ndindex(weight.shape):
            kept = weight[index]
            weight[index] = kept + by
            above = loss()
            weight[index] = kept - by
            gradients[name][index] = (above - loss()) / (2 * by)
            weight[index] = kept
    return gradients


def test_gradients_are_those_of_finite_differences(weights: Weights) -> None:
    gradients, others = ({name: np.empty_like(weight) for name, weight in weights.items()} for _ in range(2))
    MODEL.nats_and_gradients(weights, INPUTS, TARGETS, gradients)
    expected = numerical_gradients(lambda: MODEL.nats_and_gradients(weights, INPUTS, TARGETS, others), weights)
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_nats_are_minus_the_logarithm_of_the_softmax() -> None:
    surprise, _ = cross_entropy(LOGITS + 1e4, TARGETS)  # whose exponentials would overflow
    for row, target, found in zip(LOGITS.tolist(), TARGETS.tolist(), surprise.tolist(), strict=True):
        assert found == pytest.approx(-math.log(math.exp(row[target]) / sum(map(math.exp, row))))


def test_sample_depends_on_the_seed_alone_and_takes_the_likeliest_when_it_is_cold(weights: Weights) -> None:
    first, again, other = (MODEL.sample(weights, INPUTS[0], 60, seed=seed) for seed in (1, 1, 2))
    assert first.shape == (60,)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    codes = INPUTS[0]
    for code in MODEL.sample(weights, codes, 20, seed=0, temperature=1e-6):
        assert code == MODEL.logits(weights, codes[-3:][None])[0].argmax()
        codes = np.append(codes, code)


# The text that it learns.

TEXT = "\n\n".join(f"Paragraph {number} is about {number * number} things." for number in range(400))


def test_topics_are_a_real_text() -> None:
    corpus = load_topics()
    assert corpus.name == "pydoc_data.topics"
    assert corpus.characters > len(corpus.train) + len(corpus.held_out) > 300_000
    assert 80 < len(corpus.symbols) < 256
    assert 0.08 < len(corpus.held_out) / len(corpus.train) < 0.14


def test_every_tenth_block_is_held_out() -> None:
    corpus = build("t", TEXT)
    assert (corpus.digest, corpus.characters) == (hashlib.sha256(TEXT.encode()).hexdigest(), len(TEXT))
    blocks = np.array_split(corpus.encode(TEXT), 10)
    assert corpus.held_out.tolist() == blocks[9].tolist()
    assert corpus.train.tolist() == np.concatenate(blocks[:9]).tolist()


def test_repeated_paragraphs_are_dropped_whatever_their_line_breaks() -> None:
    assert list(without_repeats(["a b", "c", "a\n  b", "d", "c"])) == ["a b", "c", "d"]


def test_decode_undoes_encode_but_for_unknown_characters() -> None:
    corpus = build("t", "abcd" * 20)
    assert corpus.decode(corpus.encode("da€cab")) == "da cab"


def test_windows_precede_their_targets() -> None:
    inputs, targets = windows(np.arange(6), 3)
    assert inputs.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert targets.tolist() == [3, 4, 5]
