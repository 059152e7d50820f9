"""The character language model that `demo text` trains, in plain NumPy, and the text that it learns to continue.

The embeddings of the last few characters are concatenated and go through dense layers with rectifiers between them. The
logits of the last layer predict the next character (Bengio et al. 2003). The text is the Python manual's, which is part
of the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.floating[Any]]
Codes: TypeAlias = NDArray[np.intp]
Weights: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model; its weights are kept elsewhere."""

    symbols: int  # the number of different characters
    context: int = 8  # the number of characters that it sees
    width: int = 32  # the size of a character's embedding
    hidden: tuple[int, ...] = (384, 192)  # the sizes of the hidden layers

    def init(self, rng: np.random.Generator) -> Weights:
        """Draw the weights (He et al. 2015). The last layer's are small, so predictions start out nearly uniform.

        Returns:
            ``embedding``, float32[symbols, width], and for layer k ``w<k>``, float32[inputs, outputs], and ``b<k>``,
            float32[outputs].
        """
        weights = {"embedding": (0.3 * rng.standard_normal((self.symbols, self.width))).astype(np.float32)}
        sizes = (self.context * self.width, *self.hidden, self.symbols)
        for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
            spread = np.sqrt((2.0 if layer < len(self.hidden) else 0.1) / inputs)
            weights[f"w{layer}"] = (spread * rng.standard_normal((inputs, outputs))).astype(np.float32)
            weights[f"b{layer}"] = np.zeros(outputs, np.float32)
        return weights

    def nats_and_gradients(self, weights: Weights, inputs: Codes, targets: Codes, gradients: Weights) -> float:
        """Return the sum of the examples' losses in nats; write its gradient into the arrays of `gradients`."""
        values = self._forward(weights, inputs)
        surprise, gradient = cross_entropy(values[-1], targets)
        for layer in range(len(self.hidden), -1, -1):
            np.matmul(values[layer].T, gradient, out=gradients[f"w{layer}"])
            gradient.sum(axis=0, out=gradients[f"b{layer}"])
            gradient = gradient @ weights[f"w{layer}"].T
            if layer:
                gradient *= values[layer] > 0
        # A product with one-hot rows adds the gradients of equal characters, 3 times as fast as `np.add.at`.
        one_hot = np.zeros((inputs.size, self.symbols), gradient.dtype)
        one_hot[np.arange(inputs.size), inputs.ravel()] = 1
        np.matmul(one_hot.T, gradient.reshape(-1, self.width), out=gradients["embedding"])
        return float(surprise.sum(dtype=np.float64))

    def _forward(self, weights: Weights, inputs: Codes) -> list[Array]:
        """Return the input of each layer, and the logits last."""
        values = [weights["embedding"].take(inputs, axis=0).reshape(len(inputs), self.context * self.width)]
        for layer in range(len(self.hidden) + 1):
            value = values[-1] @ weights[f"w{layer}"]
            value += weights[f"b{layer}"]
            if layer < len(self.hidden):
                np.maximum(value, 0, out=value)
            values.append(value)
        return values

    def sample(self, weights: Weights, codes: Codes, length: int, *, seed: int, temperature: float = 0.4) -> Codes:
        """Draw `length` codes that continue the given ones, int[at least context]."""
        rng = np.random.default_rng(seed)
        drawn = codes.tolist()
        for _ in range(length):
            logits = self._forward(weights, np.array(drawn[-self.context :])[None])[-1][0] / temperature
            drawn.append(int((logits + rng.gumbel(size=len(logits))).argmax()))  # a softmax sample (Gumbel 1954)
        return np.array(drawn[len(codes) :], np.intp)


def cross_entropy(logits: Array, targets: Codes) -> tuple[Array, Array]:
    """Return each example's loss in nats, float[n], and the gradient of their sum, float[n, classes]."""
    shifted = logits - logits.max(axis=1, keepdims=True)  # so that no exponential overflows
    gradient: Array = np.exp(shifted)
    totals = gradient.sum(axis=1)
    gradient /= totals[:, None]
    expected = np.arange(len(targets)), targets
    gradient[expected] -= 1
    return np.log(totals) - shifted[expected], gradient


# The text.


class Corpus(NamedTuple):
    """A text as numbers."""

    symbols: str  # the characters that occur, sorted; a code is a position in it
    codes: Codes  # int[n]


def load_topics() -> Corpus:
    """Return the pages of `pydoc_data.topics`, half a million characters that depend on the version of Python."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    symbols, codes = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
    return Corpus("".join(map(chr, symbols)), codes)


def windows(codes: Codes, context: int) -> tuple[Codes, Codes]:
    """Return all windows of `context` codes, int[n, context], and the codes that follow them, int[n], as views."""
    return sliding_window_view(codes[:-1], context), codes[context:]
