"""`exact`: the model's own bytes, kept as they are."""

from __future__ import annotations

import mlx.core as mx

from tqstore.quant.codec import Prepared, Streams
from tqstore.quant.widen import widened


class ExactCodec:
    """One stream, `exact`, of the model's dtype; products are computed in float32."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        return {"exact": x.astype(self._dtype)}

    def decode(self, streams: Streams) -> mx.array:
        return streams["exact"]

    def prepare(self, queries: mx.array) -> Prepared:
        return Prepared(queries.astype(mx.float32))

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        vectors = widened(streams["exact"])  # [pages, heads, tokens, dim]
        return prepared.queries[None] @ vectors.swapaxes(-1, -2)

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        return (weights @ widened(streams["exact"])).sum(0)

    def finish(self, accumulated: mx.array) -> mx.array:
        return accumulated
