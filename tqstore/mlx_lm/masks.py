"""Attention masks over what a paged layer returns: keys in temporal order, first tokens first.

Owns the masks' equality with mlx-lm 0.32's own caches (mlx_lm/models/cache.py).  Does not own
which tokens are returned; that is the KVCache's.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import create_attention_mask

Mask = mx.array | str | None


def full_mask(num_new: int, offset: int, *, return_array: bool, window_size: int | None) -> Mask:
    """The mask of a layer that sees everything; what mlx-lm's KVCache gives."""
    mask: Mask = create_attention_mask(num_new, offset, return_array, window_size)
    return mask


def windowed_mask(
    num_new: int,
    offset: int,
    *,
    window: int,
    sink_tokens: int,
    return_array: bool,
    window_size: int | None,
) -> Mask:
    """The mask of a layer that sees `sink_tokens` first tokens and the last `window`.

    Without sinks this is RotatingKVCache(window)'s mask, in temporal instead of ring order.  With
    sinks RotatingKVCache hides them from all but the first query of a longer run; here they
    stay visible, so that feeding in pieces and at once agree.
    """
    capacity = window + sink_tokens
    visible = min(offset, capacity - 1)
    if num_new == 1:
        if window_size is None or offset < window_size or capacity <= window_size:
            return None
        positions = mx.arange(visible + 1)
        return (positions >= visible + 1 - max(window_size - sink_tokens, 1)) | (
            positions < sink_tokens
        )
    limit = window_size or capacity
    if visible + num_new <= limit and not return_array:
        return "causal"
    mask: mx.array = create_causal_mask(num_new, visible, window_size=max(limit - sink_tokens, 1))
    if sink_tokens:
        mask = mask | (
            create_causal_mask(num_new, visible) & _first(visible + num_new, sink_tokens)
        )
    return mask


def _first(length: int, count: int) -> mx.array:
    return mx.arange(length)[None] < count
