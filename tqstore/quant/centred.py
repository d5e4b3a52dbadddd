"""`+mean`: vectors coded as differences to their page's mean.

x_hat = m_hat + inner_hat, where m_hat is the page's mean vector, coded itself in a few bits, and
`inner` codes x - m_hat: the error of m_hat is part of what is coded.  Every page and head has its
own, so a page decodes alone; queries times means are added to the scores.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from tqstore.quant.codec import Codec, Prepared, Streams
from tqstore.quant.scale import clip_to
from tqstore.quant.widen import widened

PREFIX = "mean_"
# Differences of larger numbers may be beyond float32: such pages are coded without a mean.
_LARGEST_CENTRED = 1e38


class CentredCodec:
    """Streams: those of `inner`, and those of `mean` for one vector with the prefix `mean_`.

    `weighted_sum` accumulates the means' part, in the vectors' own space, behind the inner one.
    """

    def __init__(self, inner: Codec, mean: Codec, dim: int, dtype: mx.Dtype) -> None:
        """`inner` and `mean` decode to float32."""
        self._inner, self._mean = inner, mean
        self._dim, self._dtype = dim, dtype

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        x = widened(x)
        coded = self._mean.encode(_means(x))  # of pages of one token
        streams = self._inner.encode(x - self._mean.decode(coded))
        for name, stream in coded.items():
            streams[PREFIX + name] = stream if name == "units" else stream.squeeze(2)
        return streams

    def decode(self, streams: Streams) -> mx.array:
        differences = self._inner.decode(_inner_streams(streams))
        return clip_to(differences + self._means(streams), self._dtype)

    def prepare(self, queries: mx.array) -> Prepared:
        queries = queries.astype(mx.float32)
        for_means = self._mean.prepare(queries).queries
        return self._inner.prepare(queries)._replace(for_means=for_means)

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        for_means = Prepared(cast(mx.array, prepared.for_means))
        of_means = self._mean.scores(for_means, self._mean_streams(streams))  # of one token a page
        return self._inner.scores(prepared, _inner_streams(streams)) + of_means

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        inner = self._inner.weighted_sum(weights, _inner_streams(streams))
        of_means = weights.sum(axis=-1, keepdims=True) * self._means(streams)
        return mx.concatenate([inner, of_means.sum(0)], axis=-1)

    def finish(self, accumulated: mx.array) -> mx.array:
        inner, of_means = mx.split(accumulated, [accumulated.shape[-1] - self._dim], axis=-1)
        return self._inner.finish(inner) + of_means

    def _means(self, streams: Streams) -> mx.array:
        """float32 [pages, heads, 1, dim]."""
        return self._mean.decode(self._mean_streams(streams))

    def _mean_streams(self, streams: Streams) -> dict[str, mx.array]:
        """Streams of pages of one token, the mean."""
        coded = {name: streams[PREFIX + name] for name in ("codes", "scales", "units")}
        return {name: one if name == "units" else one[:, :, None] for name, one in coded.items()}


def _means(x: mx.array) -> mx.array:
    """[pages, heads, tokens, dim] -> [pages, heads, 1, dim]; zero where x is too large."""
    is_small = mx.max(mx.abs(x), axis=(-2, -1), keepdims=True) < _LARGEST_CENTRED
    scaled = x * (1.0 / x.shape[-2])  # first, so that the sum stays finite
    return mx.where(is_small, mx.sum(scaled, axis=-2, keepdims=True), 0.0)


def _inner_streams(streams: Streams) -> dict[str, mx.array]:
    return {name: stream for name, stream in streams.items() if not name.startswith(PREFIX)}
