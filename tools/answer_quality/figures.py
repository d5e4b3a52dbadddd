"""How far a model with a packed cache is from the same model with a dense one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import mlx.core as mx

# Positions whose logits over the whole vocabulary are computed at a time.
CHUNK = 128


@dataclass(frozen=True)
class Figures:
    """Means over the positions of one text, natural logarithms.

    `kl` is of the next-token distributions, dense against packed; `top1` how often both think the
    same token most likely; `perplexity` that of the text itself.
    """

    kl: float
    top1: float
    perplexity: float


class DenseAnswers:
    """The model's next-token distributions with a dense cache: 1 GB for 1,024 positions."""

    def __init__(self, model: Any, hidden: mx.array, tokens: Sequence[int]) -> None:
        """`hidden` is what the output layer reads, float32 [tokens, hidden]."""
        self._model, self._tokens = model, tokens
        self._expected = list(_log_probabilities(model, hidden))
        mx.eval(self._expected)

    def compared_with(self, hidden: mx.array) -> Figures:
        """The same model's hidden states of the same text with another cache."""
        kl, same, surprise = 0.0, 0, 0.0
        first = 0
        for expected, found in zip(
            self._expected, _log_probabilities(self._model, hidden), strict=True
        ):
            kl += _sum(mx.exp(expected) * (expected - found))
            same += int(_sum(mx.argmax(expected, -1) == mx.argmax(found, -1)))
            following = self._tokens[first + 1 : first + CHUNK + 1]
            if following:  # a last chunk of one position has none
                ids = mx.array(list(following))[:, None]
                surprise -= _sum(mx.take_along_axis(found[: len(ids)], ids, axis=-1))
            first += CHUNK
        count = len(self._tokens)
        return Figures(kl / count, same / count, exp(surprise / (count - 1)))


def _sum(array: mx.array) -> float:
    total: Any = mx.sum(array).item()
    return float(total)


def _log_probabilities(model: Any, hidden: mx.array) -> Iterator[mx.array]:
    """float32 [at most CHUNK positions, vocabulary], chunk after chunk."""
    for first in range(0, len(hidden), CHUNK):
        part = hidden[first : first + CHUNK]
        logits = model.model.embed_tokens.as_linear(part).astype(mx.float32)
        yield logits - mx.logsumexp(logits, axis=-1, keepdims=True)
