"""Attention of an mlx-lm model straight over packed pages, without decoding the context each step.

While `packed_attention(model)` lasts, paged layers answer `update_and_fetch` for a few new tokens
with `Pending` keys and values: shapes and dtypes, nothing decoded.  The model passes them on to
mlx-lm's attention function, where they are recognised and attended to packed.  `probe` has made
sure that the model does nothing else with them; a layer for which it does gives dense arrays.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import scaled_dot_product_attention

from tqstore.errors import InvalidInput
from tqstore.layer_cache import LayerCache
from tqstore.mlx_lm.attention_hook import AttentionCall, attention_modules, hooked

# New tokens of a step up to which pages are better read packed: single ones and drafts.  A prompt's
# chunk shares one decoding of the context among all its tokens.
MAX_NEW_TOKENS = 8


class _Active(threading.local):
    """Models that attend packed in this thread, by id, and how often that was asked for."""

    def __init__(self) -> None:
        self.models: Counter[int] = Counter()


_active = _Active()


class StaysPacked(InvalidInput, AttributeError):
    """A model looked into keys or values that were not decoded."""


@dataclass(frozen=True)
class Pending:
    """Keys or values [1, kv_heads, visible, dim] of a step that were not decoded."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    attend: Callable[[AttentionCall], mx.array]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getattr__(self, name: str) -> NoReturn:
        raise StaysPacked(
            f"the model asks for {name!r} of keys or values that stay packed",
            doing="attending to packed pages",
            remedy="Use packed_attention=False for this model",
        )


@contextmanager
def packed_attention(*models: Module) -> Iterator[None]:
    """While this lasts these models attend, in this thread, to tqstore's pages packed.

    Without it each step decodes all that its queries see.  Other models, other caches of the same
    models and other threads are not affected.  May be nested; a session does it by itself.

    >>> with packed_attention(model):                                    # doctest: +SKIP
    ...     for token, _ in generate_step(prompt, model, prompt_cache=cache): ...
    """
    modules = {module.__name__: module for model in models for module in attention_modules(model)}
    active = _active.models  # this thread's, wherever the block is left
    with hooked(list(modules.values()), _attended):
        active.update(map(id, models))
        try:
            yield
        finally:
            active.subtract(map(id, models))


def stays_packed(layer: LayerCache, num_new: int, model: int) -> bool:
    """Whether a step of `num_new` tokens is attended to packed, its own tokens being exact.

    `model` is the id of the model that takes the step.
    """
    codecs = (layer.page_spec.keys, layer.page_spec.values)
    return (
        _active.models[model] > 0
        and num_new <= min(MAX_NEW_TOKENS, layer.recent_tokens)
        and len(layer.table) > 0
        and any(codec.kind != "exact" for codec in codecs)
    )


def pending(
    layer: LayerCache, num_new: int, key_dtype: mx.Dtype, value_dtype: mx.Dtype
) -> tuple[Pending, Pending]:
    """The layer's keys and values as its last `num_new` tokens see them, to be attended to."""
    spec = layer.page_spec
    lead = (1, spec.kv_heads, layer.num_seen(num_new))
    attend = partial(_attend, layer)
    return (
        Pending((*lead, spec.key_dim), key_dtype, attend),
        Pending((*lead, spec.value_dim), value_dtype, attend),
    )


def _attend(layer: LayerCache, call: AttentionCall) -> mx.array:
    num_new = call.queries.shape[2]
    has_no_mask = call.mask is None and num_new == 1
    if has_no_mask or (isinstance(call.mask, str) and call.mask == "causal"):
        return layer.attend(call.queries[0], call.scale, call.sinks)[None]
    seen = layer.fetch_seen(num_new)  # a mask of the model's own
    return scaled_dot_product_attention(
        call.queries,
        seen.keys[None].astype(call.keys.dtype),
        seen.values[None].astype(call.values.dtype),
        cache=None,
        scale=call.scale,
        mask=call.mask,
        sinks=call.sinks,
    )


def _attended(_module: str, call: AttentionCall) -> mx.array | None:
    keys: Any = call.keys
    return keys.attend(call) if isinstance(keys, Pending) else None
