"""Codecs and vectors the tests of this folder share."""

from __future__ import annotations

import mlx.core as mx

from tqstore.quant.registry import Codec, key_codec, value_codec
from tqstore.spec import CodecSpec, PageSpec

ROTATED = [f"{kind}{bits}" for kind in ("prod", "mse", "uni") for bits in range(1, 9)]
ALL = ["exact", "int8", *ROTATED, "prod1+gauss", "prod4+gauss"]
SOME = ["exact", "int8", "prod1", "prod4", "mse2", "mse3", "mse8", "uni4", "uni7", "prod3+gauss"]


def page_spec(
    codec: str,
    dim: int,
    *,
    heads: int = 2,
    tokens: int = 16,
    dtype: str = "float32",
    rotation: str = "auto",
) -> PageSpec:
    parsed = CodecSpec.parse(codec)
    return PageSpec(heads, dim, dim, tokens, parsed, parsed, dtype, rotation)


def codec_of(spec: PageSpec, role: str = "key", seed: int = 0) -> Codec:
    return (key_codec if role == "key" else value_codec)(spec, seed)


def vectors(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def relative_error(decoded: mx.array, x: mx.array) -> float:
    """|decoded - x|^2 / |x|^2 over all, in float32."""
    decoded, x = decoded.astype(mx.float32), x.astype(mx.float32)
    return (mx.sum(mx.square(decoded - x)) / mx.sum(mx.square(x))).item()
