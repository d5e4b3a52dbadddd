"""Bias and variance of inner products over fresh rotations: what `prod` exists for.

x and y are unit vectors of cosine 0.6 in R^128.  Rotations, not vectors, are the sample: a rotation
and a vector pair give one number, and the statistics are over rotations.
"""

from functools import cache
from math import pi, sqrt

import mlx.core as mx
import numpy as np
import pytest

from tests.quant import oracle
from tests.quant.cases import vectors
from tqstore.quant.codec import Codec
from tqstore.quant.lloyd_max import LloydMaxQuantizer
from tqstore.quant.rotated import RotatedCodec
from tqstore.quant.rotation import gaussian_map, rotation
from tqstore.quant.sign_sketch import SignSketchCodec, sketch_gain

DIM, COSINE, PAIRS = 128, 0.6, 16
ROTATIONS = 1000

MSE_RATIO = {  # turboquant-facts: mean estimate over true value, bits 1..4
    "norm": (0.636, 0.886, 0.967, 0.992),
    "matched": (0.798, 0.941, 0.983, 0.996),
    "unbiased": (1.000, 1.000, 1.000, 1.000),
}
UNBIASED_VARIANCE = (0.362, 0.083, 0.0216, 0.0060)  # times d
PROD_VARIANCE = {
    "gaussian": (1.116, 0.535, 0.177, 0.056),
    "orthogonal": (0.400, 0.190, 0.060, 0.019),
}


@cache
def pairs(dim: int) -> tuple[mx.array, mx.array]:
    """x [1, 1, pairs, dim] and y [pairs, dim] of norm 1 and cosine COSINE."""
    x, other = vectors(PAIRS, dim, seed=10), vectors(PAIRS, dim, seed=11)
    x = x / mx.linalg.norm(x, axis=-1, keepdims=True)
    other = other - mx.sum(other * x, axis=-1, keepdims=True) * x
    other = other / mx.linalg.norm(other, axis=-1, keepdims=True)
    return x[None, None], COSINE * x + (1 - COSINE**2) ** 0.5 * other


def estimates(codecs: list[Codec], dim: int = DIM) -> np.ndarray:
    """Estimated cosines [rotations, pairs]."""
    x, y = pairs(dim)
    products = []
    for codec in codecs:
        scores = codec.scores(codec.prepare(y[None]), codec.encode(x))  # [1, 1, pairs, pairs]
        products.append(mx.diagonal(scores[0, 0]))
    return np.array(mx.stack(products), np.float64)


def mse_codecs(bits: int, rule: str, kind: str) -> list[Codec]:
    quantizer = LloydMaxQuantizer(DIM, bits, rule)
    # Ratios need fewer rotations than a bias of zero does.
    count = ROTATIONS if rule == "unbiased" else 200
    turns = [rotation(kind, DIM, seed, "key rotation") for seed in range(count)]
    return [RotatedCodec(turn, quantizer, mx.float32) for turn in turns]


def prod_codecs(bits: int, projection: str, kind: str, dim: int = DIM) -> list[Codec]:
    quantizer = LloydMaxQuantizer(dim, bits - 1) if bits > 1 else None
    gain = sketch_gain(dim, projection)
    codecs: list[Codec] = []
    for seed in range(ROTATIONS):
        turn = rotation(kind, dim, seed, "key rotation")
        if projection == "gaussian":
            sketch = gaussian_map(dim, seed, "key sketch")
        else:
            sketch = rotation(kind, dim, seed, "key sketch")
        codecs.append(SignSketchCodec(turn, sketch, quantizer, gain, dim, mx.float32))
    return codecs


def bias_in_standard_errors(estimated: np.ndarray, expected: float) -> float:
    """|mean - expected| over its standard error, rotations being the sample."""
    by_rotation = estimated.mean(axis=1)  # pairs under one rotation are not independent
    standard_error = by_rotation.std(ddof=1) / np.sqrt(len(by_rotation))
    return float(abs(by_rotation.mean() - expected) / standard_error)


@pytest.mark.parametrize("projection", PROD_VARIANCE)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_prod_is_unbiased_and_has_the_published_variance(bits: int, projection: str) -> None:
    estimated = estimates(prod_codecs(bits, projection, "hadamard"))
    assert bias_in_standard_errors(estimated, COSINE) <= 4
    variance = DIM * estimated.var(axis=0, ddof=1).mean()
    assert variance == pytest.approx(PROD_VARIANCE[projection][bits - 1], rel=0.09)
    if projection == "gaussian":
        # d * var = pi/2 |r|^2 |y|^2 - <r, y>^2, and <r, y> is about |r|^2 <x, y>.
        missed = (1.0, *oracle.BETA_DISTORTION[DIM])[bits - 1]
        assert variance == pytest.approx(pi / 2 * missed - (COSINE * missed) ** 2, rel=0.04)


@pytest.mark.parametrize("dim", [5, 24])
@pytest.mark.parametrize("bits", [1, 3])
def test_prod_is_unbiased_with_dense_rotations_of_any_size(bits: int, dim: int) -> None:
    """The Gaussian limit sqrt(pi / (2 dim)) would be off by 16 standard errors at dim 5."""
    estimated = estimates(prod_codecs(bits, "orthogonal", "haar", dim), dim)
    assert bias_in_standard_errors(estimated, COSINE) <= 4


def test_the_gain_of_an_orthogonal_sketch_has_the_published_limit() -> None:
    for dim, accuracy in ((1, 0.26), (128, 2.1e-3), (16384, 2e-5)):
        limit = sqrt(pi / (2 * dim))
        assert sketch_gain(dim, "orthogonal") == pytest.approx(limit, rel=accuracy)
        assert sketch_gain(dim, "orthogonal") <= limit
    assert sketch_gain(1, "orthogonal") == pytest.approx(1.0)
    assert sketch_gain(128, "gaussian") == pytest.approx(sqrt(pi / 2) / 128)


@pytest.mark.parametrize("rule", MSE_RATIO)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_mse_bias_is_the_scale_rules(bits: int, rule: str) -> None:
    estimated = estimates(mse_codecs(bits, rule, "hadamard"))
    ratio = estimated.mean() / COSINE
    assert ratio == pytest.approx(MSE_RATIO[rule][bits - 1], abs=0.004)
    if rule == "unbiased":
        assert bias_in_standard_errors(estimated, COSINE) <= 4
        variance = DIM * estimated.var(axis=0, ddof=1).mean()
        assert variance == pytest.approx(UNBIASED_VARIANCE[bits - 1], rel=0.08)
