"""What a codec is to the floors above: streams in, products out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import mlx.core as mx

Streams = Mapping[str, mx.array]


class Prepared(NamedTuple):
    """Queries made ready once for any number of `scores` calls, all float32 [heads, rows, dim]."""

    queries: mx.array  # in the space the codes live in
    sketched: mx.array | None = None  # the same seen through the sign sketch, `prod` only
    for_means: mx.array | None = None  # in the space of pages' means, `+mean` only


class Codec(Protocol):
    """One side of a page: vectors [pages, heads, tokens, dim] <-> named streams.

    Streams carry no role prefix (`codes`, not `key_codes`) and have the shapes of
    `PageSpec.streams` after a leading axis of pages.  Packed rows may also be given as uint32
    words, contiguous or strided.
    Everything is lazy, deterministic and free of state; instances may be shared between threads.
    """

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        """Finite float16, bfloat16 or float32 [pages, heads, tokens, dim] -> streams."""
        ...

    def decode(self, streams: Streams) -> mx.array:
        """[pages, heads, tokens, dim]: finite float32; `exact` gives the model's own dtype."""
        ...

    def prepare(self, queries: mx.array) -> Prepared:
        """Any float [heads, rows, dim] -> what `scores` takes."""
        ...

    def scores(self, prepared: Prepared, streams: Streams) -> mx.array:
        """Each query times each decoded vector: float32 [pages, heads, rows, tokens].

        Not scaled by 1/sqrt(dim).  Equal to the product with `decode`'s vectors within float32.
        """
        ...

    def weighted_sum(self, weights: mx.array, streams: Streams) -> mx.array:
        """float32 weights [pages, heads, rows, tokens] -> float32 [heads, rows, inner].

        The sum over pages and tokens of weight times vector, in the space the codes live in.
        Sums of several calls may be added before one `finish`.
        """
        ...

    def finish(self, accumulated: mx.array) -> mx.array:
        """[heads, rows, inner] -> float32 [heads, rows, dim]: un-rotates, once."""
        ...
