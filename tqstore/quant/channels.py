"""Which channels of a page's head are coded apart, and vectors ordered by that.

A page chooses for itself and keeps its choice, so that it decodes alone wherever it came from.
"""

from __future__ import annotations

import mlx.core as mx


def largest_channels(x: mx.array, count: int) -> mx.array:
    """float32 [pages, heads, tokens, dim] -> uint16 [pages, heads, count], ascending.

    The channels of largest mean magnitude over the page's tokens.  Which of equal ones are taken
    (a page of zeros) is left to the device's sort: any choice is right.
    """
    largest = mx.max(mx.abs(x), axis=(-2, -1), keepdims=True)
    # Relative to the largest, so that no sum overflows.
    means = mx.mean(mx.abs(x) / mx.maximum(largest, 1e-38), axis=-2)  # [pages, heads, dim]
    return mx.sort(mx.argsort(-means, axis=-1)[..., :count], axis=-1).astype(mx.uint16)


def rest_first(channels: mx.array, dim: int) -> mx.array:
    """[pages, heads, n] -> uint32 [pages, heads, dim]: all other channels, then those, ascending.

    Channels beyond `dim`, which only damage can bring, are as if they were not there.
    """
    every = mx.arange(dim, dtype=mx.int32)
    is_apart = (channels.astype(mx.int32)[..., None] == every).any(axis=-2)
    return mx.argsort(mx.where(is_apart, every + dim, every), axis=-1)


def reordered(x: mx.array, order: mx.array) -> mx.array:
    """[pages, heads, rows, dim] with the last axis in each page's and head's `order`."""
    shape = (*x.shape[:-1], order.shape[-1])
    return mx.take_along_axis(x, mx.broadcast_to(order[..., None, :], shape), axis=-1)


def in_place(x: mx.array, order: mx.array) -> mx.array:
    """Inverse of `reordered`."""
    return reordered(x, mx.argsort(order, axis=-1))
