"""The text, what is held out of it, and its windows."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiodist.demos.corpus import build, load_topics, windows, without_repeats

TEXT = "\n\n".join(f"Paragraph {number} is about {number * number} things." for number in range(400))


def test_topics_are_a_real_text() -> None:
    corpus = load_topics()
    assert corpus.name == "pydoc_data.topics"
    assert corpus.characters > 300_000
    assert 80 < len(corpus.symbols) < 256
    assert len(corpus.train) > 200_000
    assert 0.08 < len(corpus.held_out) / len(corpus.train) < 0.14


def test_digest_is_that_of_the_text() -> None:
    assert build("t", TEXT).digest == hashlib.sha256(TEXT.encode()).hexdigest()
    assert build("t", TEXT).characters == len(TEXT)


def test_every_tenth_block_is_held_out() -> None:
    corpus = build("t", TEXT)
    codes = corpus.encode(TEXT)
    blocks = np.array_split(codes, 10)
    assert corpus.decode(corpus.held_out) == corpus.decode(blocks[9])
    assert corpus.decode(corpus.train) == corpus.decode(codes[: -len(blocks[9])])


def test_nothing_is_lost_between_train_and_held_out() -> None:
    corpus = load_topics()
    kept = sorted("".join([corpus.decode(corpus.train), corpus.decode(corpus.held_out)]))
    assert "".join(sorted(set(kept))) == corpus.symbols
    assert len(kept) < corpus.characters


def test_repeated_paragraphs_are_dropped_whatever_their_line_breaks() -> None:
    assert list(without_repeats(["a b", "c", "a\n  b", "d", "c"])) == ["a b", "c", "d"]


@given(st.text(alphabet="abc d", max_size=30))
def test_decode_undoes_encode(text: str) -> None:
    corpus = build("t", "abcd" * 20)
    assert corpus.decode(corpus.encode(text)) == text


def test_unknown_characters_become_spaces() -> None:
    corpus = build("t", "abcd" * 20)
    assert corpus.decode(corpus.encode("a€b")) == "a b"


def test_windows_precede_their_targets() -> None:
    inputs, targets = windows(np.arange(6), 3)
    assert inputs.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert targets.tolist() == [3, 4, 5]
