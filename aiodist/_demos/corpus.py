"""The text that `demo text` learns to continue: the Python manual's own pages, which the standard library contains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from aiodist._demos.model import Codes

_BLOCK = 2000
_HELD_OUT = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers, split into a part to learn from and a part to be examined on.

    Attributes:
        name: where the text comes from.
        characters: its length.
        digest: sha256 of its UTF-8 bytes, in hexadecimal.
        symbols: the characters that occur, sorted; a code is a position in it.
        train: int[n], codes to learn from.
        held_out: int[m], codes of text that no training window touches.
    """

    name: str
    characters: int
    digest: str
    symbols: str
    train: Codes
    held_out: Codes

    def encode(self, text: str) -> Codes:
        """Return the codes of a text; characters that the corpus does not have become spaces."""
        codes = {symbol: code for code, symbol in enumerate(self.symbols)}
        return np.array([codes.get(character, codes[" "]) for character in text], dtype=np.intp)

    def decode(self, codes: Iterable[Any]) -> str:
        """Return the text that the codes stand for."""
        return "".join(self.symbols[code] for code in codes)


def load_topics() -> Corpus:
    """Return the pages of `pydoc_data.topics`: half a million characters; they differ by Python version.

    Many pages occur twice, alone and inside a chapter. Only the first of equal paragraphs is kept: otherwise much of
    what is held out would have been learned by heart.
    """
    from pydoc_data.topics import topics

    return build("pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics)))


def build(name: str, text: str) -> Corpus:
    """Return a corpus of `text`, of which every tenth block of 2000 characters is held out."""
    used = "\n\n".join(without_repeats(text.split("\n\n")))
    symbols = "".join(sorted({" ", *used}))
    codes = np.searchsorted(_code_points(symbols), _code_points(used))
    blocks = np.array_split(codes, max(len(codes) // _BLOCK, _HELD_OUT))
    return Corpus(
        name=name,
        characters=len(text),
        digest=hashlib.sha256(text.encode()).hexdigest(),
        symbols=symbols,
        train=np.concatenate([block for index, block in enumerate(blocks) if index % _HELD_OUT != _HELD_OUT - 1]),
        held_out=np.concatenate(blocks[_HELD_OUT - 1 :: _HELD_OUT]),
    )


def without_repeats(paragraphs: Iterable[str]) -> Iterator[str]:
    """Yield the paragraphs except those that came before, with other line breaks or the same."""
    seen = set[str]()
    for paragraph in paragraphs:
        words = " ".join(paragraph.split())
        if words not in seen:
            seen.add(words)
            yield paragraph


def windows(codes: Codes, context: int) -> tuple[Codes, Codes]:
    """Return every window of `context` codes, int[n, context], and the codes that follow them, int[n]; both views."""
    return sliding_window_view(codes[:-1], context), codes[context:]


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
