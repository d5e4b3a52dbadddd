"""Products of float32 rows with packed code rows, and codes to numbers.

Owns the choice between MLX's own quantized kernels and decode-then-multiply.  A level is the number
a code stands for before its vector's scale; scales, units and rotations are the codecs' business.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from tqstore.device import is_cpu
from tqstore.quant import bitpack
from tqstore.quant.blas import HAS_FAST_BLAS
from tqstore.quant.level_polynomial import MAX_BITS, LevelPolynomial
from tqstore.quant.widen import codes_as_floats

QMM_BITS = (1, 2, 3, 4, 5, 6, 8)
QMM_GROUPS = (128, 64, 32)
# MLX's CPU kernels decode codes again for each query row: beyond these many, once is faster.
CPU_KERNEL_ROWS = 1 if HAS_FAST_BLAS else 4


class Levels(Protocol):
    """What rows of codes [pages, heads, tokens, row] stand for."""

    def values(self, rows: mx.array) -> mx.array:
        """float32 levels [pages, heads, tokens, dim]."""
        ...

    def dot(self, queries: mx.array, rows: mx.array) -> mx.array:
        """[heads, rows, dim] -> float32 [pages, heads, rows, tokens]."""
        ...

    def combine(self, weights: mx.array, rows: mx.array) -> mx.array:
        """[pages, heads, rows, tokens] -> float32 [pages, heads, rows, dim]."""
        ...


class TableLevels:
    """Level `table[code]`, ascending and symmetric (`table[i] == -table[-1 - i]`)."""

    def __init__(self, table: np.ndarray, bits: int, dim: int) -> None:
        self.bits, self.dim = bits, dim
        self._table = mx.array(table.astype(np.float32))  # [2^bits]
        self._polynomial = LevelPolynomial(table) if bits <= MAX_BITS else None
        mx.eval(self._table)

    def of_codes(self, codes: mx.array) -> mx.array:
        """uint8 codes -> float32 levels of the same shape."""
        return self._table[codes] if self._polynomial is None else self._polynomial(codes)

    def values(self, rows: mx.array) -> mx.array:
        return self.of_codes(bitpack.unpack(rows, self.bits, self.dim))

    def dot(self, queries: mx.array, rows: mx.array) -> mx.array:
        codes = bitpack.unpack(rows, self.bits, self.dim)
        return queries[None] @ _transposed_levels(self, codes)

    def combine(self, weights: mx.array, rows: mx.array) -> mx.array:
        return weights @ self.values(rows)


def _transposed_levels(levels: TableLevels | UniformLevels, codes: mx.array) -> mx.array:
    """Codes [pages, heads, tokens, dim] -> their levels [pages, heads, dim, tokens].

    The plain BLAS of the Linux wheel multiplies by rows twice as fast as by columns, and codes
    are a quarter of the bytes of the levels to be made of them, so there they are turned first.
    """
    if HAS_FAST_BLAS:
        return levels.of_codes(codes).swapaxes(-1, -2)
    return levels.of_codes(mx.contiguous(codes.swapaxes(-1, -2)))


class UniformLevels:
    """Level `(code - zero) * step`."""

    def __init__(self, bits: int, dim: int, zero: float, step: float = 1.0) -> None:
        self.bits, self.dim, self.zero, self.step = bits, dim, zero, step
        groups = [group for group in QMM_GROUPS if dim % group == 0]
        self._group = groups[0] if groups and bits in QMM_BITS else None
        self._factors = mx.array(zero, mx.float32), mx.array(step, mx.float32)
        mx.eval(self._factors)

    def of_codes(self, codes: mx.array) -> mx.array:
        """uint8 codes -> float32 levels of the same shape."""
        return _even_levels(codes, *self._factors)

    def values(self, rows: mx.array) -> mx.array:
        return self.of_codes(bitpack.unpack(rows, self.bits, self.dim))

    def dot(self, queries: mx.array, rows: mx.array) -> mx.array:
        if _is_kernel_faster(queries.shape[-2], CPU_KERNEL_ROWS):
            words = self._kernel_words(rows)
            if words is not None:
                return self._kernel_product(queries[None], words, transpose=True)
        codes = bitpack.unpack(rows, self.bits, self.dim)
        return queries[None] @ _transposed_levels(self, codes)

    def combine(self, weights: mx.array, rows: mx.array) -> mx.array:
        if _is_kernel_faster(weights.shape[-2], 1 if self.bits == 1 else CPU_KERNEL_ROWS):
            words = self._kernel_words(rows)
            if words is not None:
                return self._kernel_product(weights, words, transpose=False)
        return weights @ self.values(rows)

    def _kernel_words(self, rows: mx.array) -> mx.array | None:
        """Rows as `mx.quantized_matmul` reads them, or None where it cannot."""
        return None if self._group is None else bitpack.as_words(rows)

    def _kernel_product(self, x: mx.array, words: mx.array, transpose: bool) -> mx.array:
        assert self._group is not None
        shape = (*words.shape[:-1], self.dim // self._group)
        scales = mx.full(shape, self.step, dtype=mx.float32)
        biases = mx.full(shape, -self.zero * self.step, dtype=mx.float32)
        return mx.quantized_matmul(
            x, words, scales, biases, transpose=transpose, group_size=self._group, bits=self.bits
        )


@mx.compile
def _even_levels(codes: mx.array, zero: mx.array, step: mx.array) -> mx.array:
    return (codes_as_floats(codes) - zero) * step


def _is_kernel_faster(rows: int, cpu_rows: int) -> bool:
    return rows <= cpu_rows or not is_cpu()


def sign_levels(dim: int) -> UniformLevels:
    """Levels -1 and +1 for sign bits 0 and 1."""
    return UniformLevels(1, dim, zero=0.5, step=2.0)
