"""Random rotations that make every vector's coordinates look alike.

Owns the matrices and where their randomness comes from: SHAKE-256 of a label, so that a seed means
the same rotation on every machine and with every numpy.  Both kinds map [..., dim] float32 to the
same shape.  `hadamard` is O(d log d) and needs no BLAS; `haar` is a dense matrix of any size.
"""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache
from typing import Protocol

import mlx.core as mx
import numpy as np

from tqstore.device import is_cpu
from tqstore.quant.blas import HAS_FAST_BLAS
from tqstore.spec import rotation_of

# One stage spreads a few-hot vector over few distinct values; two are as good as Haar.
HADAMARD_STAGES = 2


class Rotation(Protocol):
    """An orthogonal map; `inverse(apply(x))` is x up to float32 rounding."""

    def apply(self, x: mx.array) -> mx.array: ...

    def inverse(self, x: mx.array) -> mx.array: ...

    def apply_to_rows(self, x: mx.array) -> mx.array:
        """`apply` to a few rows that are not stored (queries), the fastest way: last bits vary."""
        return self.apply(x)

    def inverse_of_rows(self, x: mx.array) -> mx.array:
        return self.inverse(x)


class HadamardRotation:
    """x -> H(s_n * ... H(s_1 * x)), random signs s; H is orthonormal and self-inverse."""

    def __init__(self, signs: np.ndarray) -> None:
        self._signs = [mx.array(stage) for stage in signs.astype(np.float32)]  # each [dim]
        mx.eval(self._signs)

    def apply(self, x: mx.array) -> mx.array:
        for signs in self._signs:
            x = mx.hadamard_transform(x * signs)
        return x

    def inverse(self, x: mx.array) -> mx.array:
        for signs in reversed(self._signs):
            x = mx.hadamard_transform(x) * signs
        return x

    def apply_to_rows(self, x: mx.array) -> mx.array:
        return x @ self._matrix if _is_product_faster() else self.apply(x)

    def inverse_of_rows(self, x: mx.array) -> mx.array:
        return x @ self._matrix.T if _is_product_faster() else self.inverse(x)

    @cached_property
    def _matrix(self) -> mx.array:
        """[dim, dim], what unit vectors become."""
        matrix = self.apply(mx.eye(self._signs[0].shape[0]))
        mx.eval(matrix)
        return matrix


class DenseMap:
    """x -> M x for a square matrix; `inverse` is its transpose, hence the inverse of a rotation."""

    def __init__(self, matrix: np.ndarray) -> None:
        self._matrix = mx.array(matrix.astype(np.float32))  # [dim, dim], y = M x
        mx.eval(self._matrix)

    def apply(self, x: mx.array) -> mx.array:
        return _pagewise_product(x, self._matrix.T)

    def inverse(self, x: mx.array) -> mx.array:
        return _pagewise_product(x, self._matrix)

    def apply_to_rows(self, x: mx.array) -> mx.array:
        return x @ self._matrix.T

    def inverse_of_rows(self, x: mx.array) -> mx.array:
        return x @ self._matrix


def _is_product_faster() -> bool:
    """MLX's CPU transform is plain code: a fast BLAS does ten times the work in less time."""
    return HAS_FAST_BLAS and is_cpu()


def _pagewise_product(x: mx.array, matrix: mx.array) -> mx.array:
    """x @ matrix with one product a page for [pages, heads, tokens, dim].

    A BLAS may round a row differently in a product of more rows: a page gets the same bits whether
    it is encoded alone or with others.
    """
    if x.ndim < 4:
        return x @ matrix
    pages = x.reshape(x.shape[0], -1, x.shape[-1])
    return (pages @ mx.broadcast_to(matrix, (len(pages), *matrix.shape))).reshape(x.shape)


@lru_cache(maxsize=256)
def rotation(kind: str, dim: int, seed: int, purpose: str) -> Rotation:
    """The rotation of size `dim` for one purpose, such as "key rotation" or "value sketch".

    `kind` is auto, hadamard or haar.  Different purposes and seeds give independent rotations.
    """
    label = f"tqstore {purpose} {dim} {seed}"
    if rotation_of(kind, dim) == "hadamard":
        bits = np.unpackbits(_random_bytes(f"{label} signs", -(-HADAMARD_STAGES * dim // 8)))
        signs = 1.0 - 2.0 * bits[: HADAMARD_STAGES * dim].reshape(HADAMARD_STAGES, dim)
        return HadamardRotation(signs)
    return DenseMap(haar_matrix(dim, f"{label} normals"))


@lru_cache(maxsize=64)
def gaussian_map(dim: int, seed: int, purpose: str) -> DenseMap:
    """A matrix of independent standard normals [dim, dim], for the QJL paper's sign sketch."""
    return DenseMap(
        standard_normals(dim * dim, f"tqstore {purpose} {dim} {seed}").reshape(dim, dim)
    )


def haar_matrix(dim: int, label: str) -> np.ndarray:
    """A Haar-distributed float64 [dim, dim]: QR of normals, R's diagonal made positive."""
    q, r = np.linalg.qr(standard_normals(dim * dim, label).reshape(dim, dim))
    return np.asarray(q * np.where(np.diagonal(r) < 0, -1.0, 1.0))


def standard_normals(count: int, label: str) -> np.ndarray:
    """float64 [count] by Box and Muller from SHAKE-256(label)."""
    pairs = -(-count // 2)
    integers = _random_bytes(label, 16 * pairs).view("<u8") >> np.uint64(11)
    uniform = (integers.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _random_bytes(label: str, nbytes: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(label.encode()).digest(nbytes), dtype=np.uint8)
