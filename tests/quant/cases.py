"""Codecs and vectors the tests of this folder share."""

from __future__ import annotations

import mlx.core as mx

from tqstore.errors import InvalidInput
from tqstore.quant.registry import Codec, key_codec, value_codec
from tqstore.spec import CodecSpec, PageSpec

ROTATED = [f"{kind}{bits}" for kind in ("prod", "mse", "uni") for bits in range(1, 9)]
OPTIONS = [
    *["mse3+mean", "prod4+mean", "int8+mean", "uni6+mean", "prod3+gauss+mean+out3"],
    *["mse4+out3", "prod4+out16", "prod1+out1", "int8+out3", "uni4+out16"],
    *["mse4+mean+out16", "prod4+mean+out3", "int8+mean+out16", "uni8+mean+out3"],
    *["split2.5", "split4.5", "split2.5+mean"],
]
ALL = ["exact", "int8", *ROTATED, "prod1+gauss", "prod4+gauss", *OPTIONS]
PLAIN = [name for name in ALL if name not in OPTIONS]
SOME = ["exact", "int8", "prod1", "prod4", "mse2", "mse3", "mse8", "uni4", "uni7", "prod3+gauss"]
SOME += ["mse4+mean", "mse4+out16", "prod4+mean+out3", "int8+mean+out3", "split2.5+mean"]


def fitting(names: list[str], dims: tuple[int, ...]) -> list[tuple[str, int]]:
    """(name, dim) of all that a page spec allows."""
    return [(name, dim) for name in names for dim in dims if fits(name, dim)]


def fits(name: str, dim: int) -> bool:
    try:
        CodecSpec.parse(name).check_dim("key", dim)
    except InvalidInput:
        return False
    return True


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
