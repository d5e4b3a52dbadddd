"""Which channels of a page's head are coded apart, and vectors ordered by that.

A page chooses for itself and keeps its choice, one bit a channel, so that it decodes alone wherever
it came from.
"""

from __future__ import annotations

import mlx.core as mx

from tqstore.quant import bitpack


def largest_channels(x: mx.array, count: int) -> mx.array:
    """float32 [pages, heads, tokens, dim] -> a bit a channel, uint8 [pages, heads, ceil(dim / 8)].

    Set for the `count` channels of largest mean magnitude over the page's tokens.  Which of equal
    ones are taken (a page of zeros) is left to the device's sort: any choice is right.
    """
    largest = mx.max(mx.abs(x), axis=(-2, -1), keepdims=True)
    # Relative to the largest, so that no sum overflows.
    means = mx.mean(mx.abs(x) / mx.maximum(largest, 1e-38), axis=-2)  # [pages, heads, dim]
    rank = mx.argsort(mx.argsort(-means, axis=-1), axis=-1)
    return bitpack.pack((rank < count).astype(mx.uint8), 1)


def rest_first(channels: mx.array, dim: int) -> mx.array:
    """A bit a channel -> uint32 [pages, heads, dim]: those of bit 0, then those of 1, ascending."""
    is_apart = bitpack.unpack(channels, 1, dim).astype(mx.int32)
    return mx.argsort(mx.arange(dim, dtype=mx.int32) + is_apart * dim, axis=-1)


def reordered(x: mx.array, order: mx.array) -> mx.array:
    """[pages, heads, rows, dim] with the last axis in each page's and head's `order`."""
    shape = (*x.shape[:-1], order.shape[-1])
    return mx.take_along_axis(x, mx.broadcast_to(order[..., None, :], shape), axis=-1)


def in_place(x: mx.array, order: mx.array) -> mx.array:
    """Inverse of `reordered`."""
    return reordered(x, mx.argsort(order, axis=-1))
