"""The two codecs that are put together here: sketches of any number of rows, outlier channels."""

from __future__ import annotations

from math import pi

import mlx.core as mx
import numpy as np
import pytest

from tests.dense_attention import to_float64
from tests.seeds.attention import normals
from tqstore.seeds.key_codecs import (
    OrthogonalRows,
    TwoStreamCodec,
    least_error_factor,
    vector_codec,
)

DIM = 64
ROTATIONS = 400


@pytest.mark.parametrize("rows", [1, 20, 64, 100, 128, 200])
def test_rows_are_orthonormal_within_a_rotation_and_inverse_is_the_transpose(rows: int) -> None:
    sketch = OrthogonalRows(DIM, rows, seed=3)
    matrix = to_float64(sketch.apply(mx.eye(DIM))).T  # [rows, DIM]
    np.testing.assert_allclose(to_float64(sketch.inverse(mx.eye(rows))), matrix, atol=1e-6)
    for start in range(0, rows, DIM):
        part = matrix[start : start + DIM]
        np.testing.assert_allclose(part @ part.T, np.eye(len(part)), atol=1e-5)
    if rows > DIM:  # parts are different rotations
        assert np.abs(matrix[:DIM] @ matrix[DIM : 2 * DIM].T).max() < 0.9


def inner_products(bits: int, rows: int | None, *, is_unbiased: bool) -> np.ndarray:
    """Estimates of <q, k> for unit vectors of cosine 0.6, one a rotation."""
    key = np.array(normals(DIM, seed=1, dtype=mx.float32))
    key /= np.linalg.norm(key)
    other = np.array(normals(DIM, seed=2, dtype=mx.float32))
    other -= key * (key @ other)
    query = 0.6 * key + 0.8 * other / np.linalg.norm(other)
    products = []
    for seed in range(ROTATIONS):
        codec = vector_codec("prod", bits, DIM, seed, rows, is_unbiased=is_unbiased)
        prepared = codec.prepare(mx.array(query.astype(np.float32))[None, None])
        streams = codec.encode(mx.array(key)[None, None, None])
        products.append(codec.scores(prepared, streams).item())
    return np.array(products)


@pytest.mark.parametrize("rows", [24, None, 160])
@pytest.mark.parametrize("bits", [1, 3])
def test_every_sketch_is_unbiased_when_it_should_be(bits: int, rows: int | None) -> None:
    products = inner_products(bits, rows, is_unbiased=True)
    assert abs(products.mean() - 0.6) < 4 * products.std() / ROTATIONS**0.5


@pytest.mark.parametrize("rows", [24, None, 128])
def test_the_least_error_is_less_than_the_unbiased(rows: int | None) -> None:
    rng = np.random.default_rng(0)
    keys, queries = (mx.array(rng.normal(size=(n, DIM)).astype(np.float32)) for n in (2000, 20))
    exact = to_float64(queries @ keys.T)
    errors = {}
    for is_unbiased in (True, False):
        codec = vector_codec("prod", 1, DIM, 0, rows, is_unbiased=is_unbiased)
        scores = codec.scores(codec.prepare(queries[None]), codec.encode(keys[None, None]))
        errors[is_unbiased] = np.mean((to_float64(scores[0, 0]) - exact) ** 2)
    # With an error of variance v, the best multiple 1 / (1 + v) leaves v / (1 + v) of 1.
    factor = least_error_factor(DIM, rows or DIM)
    assert errors[False] / errors[True] == pytest.approx(factor, rel=0.07)


def test_the_factor_of_a_square_sketch_is_two_over_pi() -> None:
    assert least_error_factor(128, 128) == pytest.approx(2 / pi, rel=0.01)
    assert least_error_factor(128, 64) == pytest.approx(1 / pi, rel=0.01)
    assert least_error_factor(128, 256) == pytest.approx(1 / (1 + (pi / 2 - 1) / 2), rel=0.01)
    assert least_error_factor(128, 1 << 14) > 0.99


@pytest.mark.parametrize("kind", ["mse", "prod"])
@pytest.mark.parametrize("dim", [20, 128])
def test_outliers_are_int8_and_scores_are_those_of_the_decoded(kind: str, dim: int) -> None:
    keys = normals(30, dim, dtype=mx.float32) * 1.0
    keys[:, 5] = keys[:, 5] * 50
    keys[:, 11] = keys[:, 11] * 50
    channels = np.array([5, 11])
    codec = TwoStreamCodec(
        vector_codec(kind, 3, dim - 2, 0, None, is_unbiased=False), channels, dim
    )
    streams = codec.encode(keys[None, None])
    decoded = codec.decode(streams)
    error = mx.abs(decoded[0, 0] - keys)[:, [5, 11]]
    step = mx.abs(keys[:, [5, 11]]).max(axis=1, keepdims=True) / 127
    assert (error <= 0.51 * step).all().item()
    queries = normals(4, dim, seed=3, dtype=mx.float32)[None]
    scores = codec.scores(codec.prepare(queries), streams)[0, 0]
    np.testing.assert_allclose(
        to_float64(scores), to_float64(queries[0]) @ to_float64(decoded[0, 0]).T,
        rtol=1e-4, atol=1e-3,
    )  # fmt: skip
