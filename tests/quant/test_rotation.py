"""Rotations are orthogonal, invertible, independent, Haar where they say so, and pinned."""

import mlx.core as mx
import numpy as np
import pytest

from tqstore.quant.rotation import gaussian_map, haar_matrix, rotation, standard_normals
from tqstore.spec import has_hadamard

PINNED_NORMALS = [
    *[0.002509656116635803, -0.47010594119694255],
    *[-0.08049788816398933, 1.4802899659130035],
]
PINNED_SIGNS = "---+-+-++-+--++++--+-+----+-+-+-"
DIMS = (1, 2, 8, 32, 48, 64, 80, 96, 100, 112, 128, 192, 256, 384, 576)


def matrix_of(kind: str, dim: int, seed: int = 0, purpose: str = "key rotation") -> np.ndarray:
    """The map as float64 [dim, dim], column i what it makes of unit vector i."""
    return np.array(rotation(kind, dim, seed, purpose).apply(mx.eye(dim)), np.float64).T


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["auto", "haar", "hadamard"])
def test_apply_is_orthogonal_and_inverse_undoes_it(kind: str, dim: int) -> None:
    if kind == "hadamard" and not has_hadamard(dim):
        pytest.skip("refused by PageSpec")
    matrix = matrix_of(kind, dim)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=3e-6)
    x = mx.random.normal((3, 2, 5, dim), key=mx.random.key(dim))
    turn = rotation(kind, dim, 0, "key rotation")
    assert mx.allclose(turn.inverse(turn.apply(x)), x, atol=1e-5)
    assert mx.allclose(turn.apply(turn.inverse(x)), x, atol=1e-5)


@pytest.mark.parametrize("dim", [dim for dim in range(1, 1537) if has_hadamard(dim)])
def test_every_hadamard_size_is_orthonormal_and_self_inverse(dim: int) -> None:
    matrix = np.array(mx.hadamard_transform(mx.eye(dim)), np.float64)
    np.testing.assert_allclose(np.abs(matrix), dim**-0.5, rtol=1e-5)
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=2e-5)


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_seeds_and_purposes_are_independent(kind: str) -> None:
    matrices = [
        matrix_of(kind, 64, seed, purpose)
        for seed in (0, 1)
        for purpose in ("key rotation", "key sketch", "value rotation", "value sketch")
    ]
    for i, first in enumerate(matrices):
        for second in matrices[:i]:
            overlap = np.trace(first.T @ second) / 64  # of independent ones: about 1/64
            assert abs(overlap) < 0.25
    assert rotation(kind, 64, 0, "key rotation") is rotation(kind, 64, 0, "key rotation")


def test_randomness_is_pinned() -> None:
    """A stored page can only be read with the rotation it was written with: this never changes."""
    np.testing.assert_allclose(standard_normals(4, "pinned"), PINNED_NORMALS, rtol=1e-12)
    signs = np.sign(matrix_of("hadamard", 32)[:, 0]).astype(int)
    assert "".join("-+"[int(sign > 0)] for sign in signs) == PINNED_SIGNS


def test_normals_are_standard_normal() -> None:
    x = standard_normals(200_001, "moments")
    assert x.shape == (200_001,)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(x**power) - moment) < 4 * np.sqrt(spread / len(x))
    half = len(x) // 2
    assert abs(np.corrcoef(x[:half], x[half : 2 * half])[0, 1]) < 4 / np.sqrt(half)


def test_dense_rotations_are_haar_not_raw_qr() -> None:
    """Without the sign fix the first entry is always negative; Haar's is symmetric."""
    dim, count = 6, 3000
    matrices = np.stack([haar_matrix(dim, f"haar {i}") for i in range(count)])
    assert np.abs(matrices.mean(0)).max() < 4.5 / np.sqrt(count * dim)
    np.testing.assert_allclose((matrices**2).mean(0), 1 / dim, atol=0.03)
    trace = np.trace(matrices, axis1=1, axis2=2)
    assert abs(np.mean(trace**2) - 1) < 0.12  # E tr^2 = 1 for Haar on O(d)
    assert {-1.0, 1.0} == {haar_matrix(1, f"haar {i}")[0, 0] for i in range(20)}


def test_stages_spread_a_few_hot_vector() -> None:
    """One stage turns a 1-hot vector into +-1/sqrt(d) everywhere: kurtosis 1 instead of 3."""
    kurtosis = []
    for seed in range(40):
        turn = rotation("hadamard", 128, seed, "key rotation")
        y = np.array(turn.apply(mx.eye(128)[3] + 0.5 * mx.eye(128)[77]), np.float64)
        kurtosis.append(np.mean(y**4) / np.mean(y**2) ** 2)
    assert 2.5 < np.mean(kurtosis) < 3.3  # of a random unit vector in R^128: 2.95


def test_gaussian_map_is_square_and_standard_normal() -> None:
    matrix = np.array(gaussian_map(128, 0, "key sketch").apply(mx.eye(128)))
    assert abs(matrix.mean()) < 4 / 128
    assert abs(matrix.var() - 1) < 4 * np.sqrt(2) / 128
