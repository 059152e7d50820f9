"""Text that a trained language model writes."""

from __future__ import annotations

import numpy as np

from aiodist.demos.corpus import Corpus
from aiodist.demos.language_model import LanguageModel
from aiodist.demos.perceptron import Weights


def continue_text(
    model: LanguageModel, weights: Weights, corpus: Corpus, prompt: str, length: int, *, seed: int, heat: float = 0.4
) -> str:
    """Return `length` characters that the model draws after the prompt; the cooler, the likelier each is."""
    rng = np.random.default_rng(seed)
    codes = list(corpus.encode(prompt.rjust(model.context)))
    start = len(codes)
    for _ in range(length):
        window = np.array(codes[-model.context :])[None]
        logits = model.logits(weights, window)[0] / heat
        codes.append((logits + rng.gumbel(size=len(logits))).argmax())  # a draw by their softmax (Gumbel 1954)
    return corpus.decode(codes[start:])
