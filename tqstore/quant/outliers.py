"""`+out{n}` and `split`: a page's largest channels coded apart, the rest with fewer coordinates.

Nothing of a channel apart reaches the rotation of the rest.  Owns neither coding: it is given one
for the rest and one for the channels.  Which these are is every page's own (channels.py), so pages
of one run may differ, and products are taken with each page as a head of its own.
"""

from __future__ import annotations

import mlx.core as mx

from tqstore.quant.channels import in_place, largest_channels, reordered, rest_first
from tqstore.quant.codec import Codec, Prepared, Streams
from tqstore.quant.scale import clip_to
from tqstore.quant.widen import widened

PREFIX = "outlier_"


class OutlierCodec:
    """Streams: those of `rest`; those of `apart` with the prefix; `outlier_channels`.

    `weighted_sum` accumulates in the vectors' own space.
    """

    def __init__(self, rest: Codec, apart: Codec, count: int, dim: int, dtype: mx.Dtype) -> None:
        """`rest` codes dim - count coordinates, `apart` codes `count`; both decode to float32."""
        self._rest, self._apart = rest, apart
        self._count, self._dim, self._dtype = count, dim, dtype

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        x = widened(x)
        channels = largest_channels(x, self._count)
        rest, apart = self._parts(reordered(x, rest_first(channels, self._dim)))
        streams = self._rest.encode(rest)
        for name, stream in self._apart.encode(apart).items():
            streams[PREFIX + name] = stream
        return streams | {PREFIX + "channels": channels}

    def decode(self, streams: Streams) -> mx.array:
        rest, apart = _split(streams)
        vectors = mx.concatenate([self._rest.decode(rest), self._apart.decode(apart)], axis=-1)
        return clip_to(in_place(vectors, self._order(streams)), self._dtype)

    def prepare(self, queries: mx.array) -> Prepared:
        return Prepared(queries.astype(mx.float32))

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        queries = prepared.queries  # [heads, rows, dim]
        pages, heads, tokens = streams["scales"].shape
        rows = queries.shape[-2]
        if rows > tokens:  # than to rotate every query for every page
            return queries[None] @ self.decode(streams).swapaxes(-1, -2)
        each = mx.broadcast_to(queries, (pages, *queries.shape))
        parts = self._parts(_as_heads(reordered(each, self._order(streams)))[0])
        products = mx.zeros((), mx.float32)
        for codec, part, own in zip(self._codecs, parts, _split(streams), strict=True):
            products = products + codec.scores(codec.prepare(part), _streams_as_heads(own))
        return products.reshape(pages, heads, rows, tokens)

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        pages, heads, rows, tokens = weights.shape
        if rows > tokens:
            return (weights @ self.decode(streams)).sum(0)
        sums = [
            codec.finish(codec.weighted_sum(_as_heads(weights), _streams_as_heads(own)))
            for codec, own in zip(self._codecs, _split(streams), strict=True)
        ]
        by_page = mx.concatenate(sums, axis=-1).reshape(pages, heads, rows, self._dim)
        return in_place(by_page, self._order(streams)).sum(0)

    def finish(self, accumulated: mx.array) -> mx.array:
        return accumulated

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return self._rest, self._apart

    def _order(self, streams: Streams) -> mx.array:
        return rest_first(streams[PREFIX + "channels"], self._dim)

    def _parts(self, ordered: mx.array) -> tuple[mx.array, mx.array]:
        at = self._dim - self._count
        return ordered[..., :at], ordered[..., at:]


def _split(streams: Streams) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """(streams of the rest, streams of the channels apart without their prefix)."""
    rest = {name: stream for name, stream in streams.items() if not name.startswith(PREFIX)}
    apart = {
        name.removeprefix(PREFIX): stream
        for name, stream in streams.items()
        if name.startswith(PREFIX) and name != PREFIX + "channels"
    }
    return rest, apart


def _as_heads(array: mx.array) -> mx.array:
    """[pages, heads, ...] -> [1, pages * heads, ...]."""
    return array.reshape(1, -1, *array.shape[2:])


def _streams_as_heads(streams: Streams) -> dict[str, mx.array]:
    return {name: _as_heads(stream) for name, stream in streams.items()}
