"""Text that a model writes."""

from __future__ import annotations

import numpy as np

from aiodist.demos.corpus import build
from aiodist.demos.language_model import LanguageModel
from aiodist.demos.sampling import continue_text

CORPUS = build("t", "abcdefgh\n" * 50)
MODEL = LanguageModel(len(CORPUS.symbols), context=4, width=8, hidden=(16,))
WEIGHTS = MODEL.init(np.random.default_rng(0))


def draw(seed: int, prompt: str = "abc", heat: float = 0.5) -> str:
    return continue_text(MODEL, WEIGHTS, CORPUS, prompt, 60, seed=seed, heat=heat)


def test_sample_has_the_length_and_symbols_asked_for() -> None:
    assert len(draw(0)) == 60
    assert set(draw(0)) <= set(CORPUS.symbols)


def test_sample_depends_on_the_seed_alone() -> None:
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_prompt_shorter_than_the_context_is_padded() -> None:
    assert len(draw(0, prompt="")) == 60


def test_cold_model_takes_the_likeliest() -> None:
    codes = CORPUS.encode("abcd")
    for code in CORPUS.encode(draw(0, "abcd", heat=1e-6)):
        assert code == MODEL.logits(WEIGHTS, codes[-4:][None])[0].argmax()
        codes = np.append(codes, code)
