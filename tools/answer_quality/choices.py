"""How a page's means and channels are best chosen, on the real model's own queries and keys.

Compares policies that the product could follow, most of which it does not: the KL of each layer's
attention weights to those of exact keys, mean over queries, heads and layers.  Owns the policies;
quantizers and rotations are the product's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gemma3_text

from tools.answer_quality.forward import STEP
from tqstore.quant.lloyd_max import LloydMaxQuantizer
from tqstore.quant.rotation import rotation

Decode = Callable[["Layer"], mx.array]


@dataclass(frozen=True)
class Layer:
    """What one attention layer computes with, after RoPE."""

    queries: mx.array  # [heads, n, dim]
    keys: mx.array  # [n, dim]
    bias: mx.array  # [n, n]: 0 where a query sees a key
    scale: float
    rope: Any


def recorded(model: Any, tokens: Sequence[int]) -> list[Layer]:
    """Every layer's queries and keys in a pass with a dense cache."""
    found: list[Layer] = []
    gemma: Any = gemma3_text
    original = gemma.scaled_dot_product_attention
    attentions = [layer.self_attn for layer in model.layers]

    def record(queries: mx.array, keys: mx.array, values: mx.array, **rest: Any) -> mx.array:
        attention = attentions[len(found)]
        window = model.model.window_size if attention.is_sliding else None
        bias = _bias(len(tokens), window)
        found.append(Layer(queries[0], keys[0, 0], bias, rest["scale"], attention.rope))
        attended: mx.array = original(queries, keys, values, **rest)
        return attended

    gemma.scaled_dot_product_attention = record
    try:
        mx.eval(model.model(mx.array([list(tokens)])))
    finally:
        gemma.scaled_dot_product_attention = original
    return found


def _bias(count: int, window: int | None) -> mx.array:
    distance = np.arange(count)[:, None] - np.arange(count)[None]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return mx.array(np.where(visible, 0.0, -1e9).astype(np.float32))


def attention_kl(layer: Layer, decoded: mx.array) -> float:
    """Mean over queries and heads of the KL of attention weights, exact against decoded keys."""
    exact, found = (
        _log_weights(layer.queries @ keys.T * layer.scale + layer.bias)
        for keys in (layer.keys, decoded)
    )
    mean: Any = mx.mean(mx.sum(mx.exp(exact) * (exact - found), axis=-1)).item()
    return float(mean)


def _log_weights(scores: mx.array) -> mx.array:
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


def coded(x: mx.array, bits: int, rule: str = "matched") -> mx.array:
    """[pages, tokens, dim] -> the same after rotation and Lloyd-Max codes."""
    turn = rotation("auto", x.shape[-1], 0, "key rotation")
    quantizer = LloydMaxQuantizer(x.shape[-1], bits, rule)
    codes, scales = quantizer.quantize(turn.apply(x))
    return turn.inverse(quantizer.levels.of_codes(codes) * scales.astype(mx.float32)[..., None])


@dataclass(frozen=True)
class Policy:
    """`mean` is none, page, first (block), position (before RoPE, page); `period` blocks share the
    channels chosen in their first, 0 for all; `channels` are coded at `bits`, the rest at 4."""

    mean: str = "none"
    channels: int = 0
    bits: int = 5
    period: int = 1
    rule: str = "matched"
    first_exact: bool = False

    def __call__(self, layer: Layer) -> mx.array:
        pages = layer.keys.reshape(-1, STEP, layer.keys.shape[-1])
        means = self._means(layer, pages)
        differences = pages - means
        decoded = self._coded(differences) + means
        if self.first_exact:
            decoded = mx.concatenate([pages[:1], decoded[1:]])
        return decoded.reshape(layer.keys.shape)

    def _means(self, layer: Layer, pages: mx.array) -> mx.array:
        if self.mean == "none":
            return mx.zeros_like(pages)
        if self.mean == "position":
            return _turned_means(layer, pages)
        of = pages[:1] if self.mean == "first" else pages
        means = coded(of.mean(axis=1, keepdims=True), 4)
        return mx.broadcast_to(means, pages.shape)

    def _coded(self, x: mx.array) -> mx.array:
        if not self.channels:
            return coded(x, 4, self.rule)
        dim = x.shape[-1]
        magnitudes = np.array(mx.abs(x).mean(axis=1))  # [pages, dim]
        period = self.period or len(magnitudes)
        done = []
        for at in range(len(magnitudes)):
            order = np.argsort(-magnitudes[at // period * period], kind="stable")
            apart, rest = np.sort(order[: self.channels]), np.sort(order[self.channels :])
            back = mx.array(np.argsort(np.concatenate([rest, apart])))
            page = x[at : at + 1]
            parts = [
                coded(page[..., mx.array(rest)], 4, self.rule),
                coded(page[..., mx.array(apart)], self.bits, self.rule),
            ]
            done.append(mx.concatenate(parts, axis=-1)[..., back])
            assert done[-1].shape[-1] == dim
        return mx.concatenate(done)


def _turned_means(layer: Layer, pages: mx.array) -> mx.array:
    """Means of the keys before RoPE, turned to each position."""
    rope = layer.rope

    def turn(x: mx.array, direction: float) -> mx.array:
        base = rope.base
        return mx.fast.rope(
            x[None, None], x.shape[-1], traditional=False, base=base, scale=direction, offset=0
        )[0, 0]

    before = turn(layer.keys, -1.0).reshape(pages.shape)
    means = mx.broadcast_to(coded(before.mean(axis=1, keepdims=True), 4), pages.shape)
    return turn(means.reshape(layer.keys.shape), 1.0).reshape(pages.shape)


POLICIES = {
    "4 bits, nothing else": Policy(),
    "first block exact": Policy(first_exact=True),
    "mean of the first block": Policy("first"),
    "**mean of each page** (`+mean`)": Policy("page"),
    "mean of each page before RoPE": Policy("position"),
    "16 channels at 8 bits of the first block": Policy("none", 16, 8, 0),
    "**16 channels of each page** (`+out16`)": Policy("none", 16, 8),
    "mean and 16 channels of the first block": Policy("first", 16, 8, 0),
    "mean of each page, 16 channels of the first block": Policy("page", 16, 8, 0),
    "mean of each page, 16 channels every 4 blocks": Policy("page", 16, 8, 4),
    "**mean and 16 channels of each page** (`+mean+out16`)": Policy("page", 16, 8),
    "mean and 32 channels at 6 bits": Policy("page", 32, 6),
    "**mean and 64 channels at 5 bits** (`split4.5+mean`)": Policy("page", 64, 5),
    "the same, channels of the first block": Policy("page", 64, 5, 0),
    "the same, channels every 4 blocks": Policy("page", 64, 5, 4),
    "the same, mean before RoPE": Policy("position", 64, 5),
    "the same, first block exact": Policy("page", 64, 5, first_exact=True),
    "the same, unbiased scale": Policy("page", 64, 5, rule="unbiased"),
    "the same, the paper's norm": Policy("page", 64, 5, rule="norm"),
}


def measured(model: Any, tokens: Sequence[int], progress: Callable[[str, int, int], None]) -> Any:
    """By policy: mean and largest of the layers' KL."""
    layers = recorded(model, tokens)
    found = {}
    for done, (name, policy) in enumerate(POLICIES.items()):
        progress(f"choices: {name}", done, len(POLICIES))
        by_layer = [attention_kl(layer, policy(layer)) for layer in layers]
        found[name] = {"mean": float(np.mean(by_layer)), "largest": max(by_layer)}
    return found
