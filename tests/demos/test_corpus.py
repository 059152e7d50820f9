"""The text, what is held out of it, and its windows."""

from __future__ import annotations

import hashlib

import numpy as np

from aiodist._demos.corpus import build, load_topics, windows, without_repeats

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
