"""Products of float32 rows with packed code rows, and codes to numbers.

Owns the choice between MLX's own quantized kernels and decode-then-multiply.  A level is the number a
code stands for before its vector's scale; scales, units and rotations are the codecs' business.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from tqstore.quant import bitpack

QMM_BITS = (1, 2, 3, 4, 5, 6, 8)
QMM_GROUPS = (128, 64, 32)


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
        self.table = mx.array(table.astype(np.float32))  # [2^bits]
        mx.eval(self.table)

    def of_codes(self, codes: mx.array) -> mx.array:
        """uint8 codes -> float32 levels of the same shape."""
        return self.table[codes]

    def values(self, rows: mx.array) -> mx.array:
        return self.of_codes(bitpack.unpack(rows, self.bits, self.dim))

    def dot(self, queries: mx.array, rows: mx.array) -> mx.array:
        return queries[None] @ self.values(rows).swapaxes(-1, -2)

    def combine(self, weights: mx.array, rows: mx.array) -> mx.array:
        return weights @ self.values(rows)


class UniformLevels:
    """Level `(code - zero) * step`."""

    def __init__(self, bits: int, dim: int, zero: float, step: float = 1.0) -> None:
        self.bits, self.dim, self.zero, self.step = bits, dim, zero, step
        groups = [group for group in QMM_GROUPS if dim % group == 0]
        self._group = groups[0] if groups and bits in QMM_BITS else None

    def of_codes(self, codes: mx.array) -> mx.array:
        """uint8 codes -> float32 levels of the same shape."""
        return (codes.astype(mx.float32) - self.zero) * self.step

    def values(self, rows: mx.array) -> mx.array:
        return self.of_codes(bitpack.unpack(rows, self.bits, self.dim))

    def dot(self, queries: mx.array, rows: mx.array) -> mx.array:
        product = self._kernel_product(queries[None], rows, transpose=True)
        return queries[None] @ self.values(rows).swapaxes(-1, -2) if product is None else product

    def combine(self, weights: mx.array, rows: mx.array) -> mx.array:
        product = self._kernel_product(weights, rows, transpose=False)
        return weights @ self.values(rows) if product is None else product

    def _kernel_product(self, x: mx.array, rows: mx.array, transpose: bool) -> mx.array | None:
        """`mx.quantized_matmul` over the packed words, or None where it cannot read these rows."""
        words = bitpack.as_words(rows)
        if self._group is None or words is None:
            return None
        shape = (*words.shape[:-1], self.dim // self._group)
        scales = mx.full(shape, self.step, dtype=mx.float32)
        biases = mx.full(shape, -self.zero * self.step, dtype=mx.float32)
        return mx.quantized_matmul(
            x, words, scales, biases, transpose=transpose, group_size=self._group, bits=self.bits
        )


def sign_levels(dim: int) -> UniformLevels:
    """Levels -1 and +1 for sign bits 0 and 1."""
    return UniformLevels(1, dim, zero=0.5, step=2.0)
