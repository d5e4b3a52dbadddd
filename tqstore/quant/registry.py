"""From a page spec and a seed to the codec of its keys or values.

Owns which parts a codec string is made of.  Codecs are memoised: a deterministic function of the
codec, the dimension, the dtype, the rotation, the seed and the side; layers share them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import mlx.core as mx

from tqstore.codec_spec import MEAN_BITS
from tqstore.quant.centred import CentredCodec
from tqstore.quant.codec import Codec, Prepared
from tqstore.quant.exact import ExactCodec
from tqstore.quant.int8 import Int8Codec
from tqstore.quant.lloyd_max import LloydMaxQuantizer
from tqstore.quant.outliers import OutlierCodec
from tqstore.quant.rotated import RotatedCodec
from tqstore.quant.rotation import gaussian_map, rotation
from tqstore.quant.runwise import RunwiseCodec
from tqstore.quant.sign_sketch import SignSketchCodec, sketch_gain
from tqstore.quant.uniform import UniformQuantizer
from tqstore.spec import CodecSpec, PageSpec

__all__ = ["Codec", "Prepared", "default_scale_rule", "key_codec", "value_codec"]

_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def key_codec(spec: PageSpec, seed: int) -> Codec:
    """The codec of `spec`'s keys under the rotations of `seed`."""
    return _codec(spec.keys, spec.key_dim, spec.dtype, spec.rotation, seed, "key")


def value_codec(spec: PageSpec, seed: int) -> Codec:
    """The codec of `spec`'s values under the rotations of `seed`."""
    return _codec(spec.values, spec.value_dim, spec.dtype, spec.rotation, seed, "value")


def default_scale_rule(bits: int) -> str:
    """Norm-matched scales give the least softmax KL from 3 bits up, the paper's norm below."""
    return "matched" if bits >= 3 else "norm"


@lru_cache(maxsize=256)
def _codec(codec: CodecSpec, dim: int, dtype: str, kind: str, seed: int, role: str) -> Codec:
    return RunwiseCodec(_whole_codec(codec, dim, dtype, kind, seed, role), dim)


def _whole_codec(codec: CodecSpec, dim: int, dtype: str, kind: str, seed: int, role: str) -> Codec:
    if codec.is_centred:
        differences = replace(codec, is_centred=False)
        inner = _whole_codec(differences, dim, "float32", kind, seed, role)
        mean = _lloyd_max(dim, MEAN_BITS, "float32", kind, seed, f"{role} mean rotation")
        return CentredCodec(inner, mean, dim, _DTYPES[dtype])
    count = codec.num_outliers(dim)
    if count:
        rest = _plain_codec(codec, dim - count, "float32", kind, seed, role)
        apart = _channels_apart(codec, count, kind, seed, role)
        return OutlierCodec(rest, apart, count, dim, _DTYPES[dtype])
    return _plain_codec(codec, dim, dtype, kind, seed, role)


def _channels_apart(codec: CodecSpec, count: int, kind: str, seed: int, role: str) -> Codec:
    if codec.kind != "split":
        return Int8Codec(count, mx.float32)
    purpose = f"{role} outlier rotation"
    return _lloyd_max(count, codec.outlier_bits, "float32", kind, seed, purpose)


def _plain_codec(codec: CodecSpec, dim: int, dtype: str, kind: str, seed: int, role: str) -> Codec:
    """The codec of all `dim` coordinates alike, whatever options there are."""
    if codec.kind == "exact":
        return ExactCodec(_DTYPES[dtype])
    if codec.kind == "int8":
        return Int8Codec(dim, _DTYPES[dtype])
    turn = rotation(kind, dim, seed, f"{role} rotation")
    if codec.kind == "prod":
        orthogonal = codec.projection == "orthogonal"
        draw = rotation(kind, dim, seed, f"{role} sketch") if orthogonal else None
        sketch = draw or gaussian_map(dim, seed, f"{role} sketch")
        quantizer = LloydMaxQuantizer(dim, codec.code_bits) if codec.code_bits else None
        gain = sketch_gain(dim, codec.projection)
        return SignSketchCodec(turn, sketch, quantizer, gain, dim, _DTYPES[dtype])
    if codec.kind == "uni":
        return RotatedCodec(turn, UniformQuantizer(dim, codec.bits), _DTYPES[dtype])
    return _lloyd_max(dim, codec.bits, dtype, kind, seed, f"{role} rotation")


def _lloyd_max(dim: int, bits: int, dtype: str, kind: str, seed: int, purpose: str) -> Codec:
    quantizer = LloydMaxQuantizer(dim, bits, default_scale_rule(bits))
    return RotatedCodec(rotation(kind, dim, seed, purpose), quantizer, _DTYPES[dtype])
