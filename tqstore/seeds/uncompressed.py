"""ESML's dense baseline: what was appended, bit for bit.

Owns a numpy buffer a layer and side.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tqstore.seeds.layer_arrays import LayerArrays, Vectors, check_same_tokens


class UncompressedKVCache:
    """The dense baseline with the same interface: what was appended, bit for bit.

    A layer's dtype is the widest of what it was given; bfloat16 is kept as float32.
    """

    def __init__(self, n_layers: int, head_dim: int, n_heads: int | None = None) -> None:
        self._arrays = LayerArrays(n_layers, head_dim, n_heads)
        self.n_layers, self.head_dim, self.n_heads = n_layers, head_dim, n_heads
        self.clear()

    def append(self, layer: int, k_vec: Vectors, v_vec: Vectors) -> None:
        """As TurboQuantKVCache.append."""
        self._arrays.check_layer(layer)
        keys, values = self._arrays.checked("k_vec", k_vec), self._arrays.checked("v_vec", v_vec)
        check_same_tokens(keys.shape[1], values.shape[1])
        self._keys[layer].append(keys)
        self._values[layer].append(values)

    def get_keys(self, layer: int) -> npt.NDArray[np.floating]:
        """[seq_len, head_dim]; [n_heads, seq_len, head_dim] with heads."""
        self._arrays.check_layer(layer)
        return self._arrays.shown(self._keys[layer].rows())

    def get_values(self, layer: int) -> npt.NDArray[np.floating]:
        """The same of the values."""
        self._arrays.check_layer(layer)
        return self._arrays.shown(self._values[layer].rows())

    @property
    def seq_len(self) -> int:
        """Tokens of layer 0."""
        return self._keys[0].num_tokens

    def clear(self) -> None:
        """Forgets every token of every layer."""
        self._keys, self._values = (
            [_DenseRows(self._arrays.heads, self.head_dim) for _ in range(self.n_layers)]
            for _ in range(2)
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of the vectors that are held, in the dtypes they have."""
        return sum(rows.nbytes for rows in (*self._keys, *self._values))


class _DenseRows:
    """[heads, tokens, dim] in a numpy buffer that doubles."""

    def __init__(self, heads: int, dim: int) -> None:
        self._buffer: npt.NDArray[np.floating] = np.empty((heads, 0, dim), np.float16)
        self.num_tokens = 0

    @property
    def nbytes(self) -> int:
        return self.rows().nbytes

    def rows(self) -> npt.NDArray[np.floating]:
        """A copy: what a caller does to it stays with the caller."""
        return self._buffer[:, : self.num_tokens].copy()

    def append(self, vectors: npt.NDArray[np.floating]) -> None:
        total = self.num_tokens + vectors.shape[1]
        dtype = np.result_type(self._buffer, vectors)
        if total > self._buffer.shape[1] or dtype != self._buffer.dtype:
            heads, slots, dim = self._buffer.shape
            grown = np.empty((heads, max(total, 2 * slots), dim), dtype)
            grown[:, : self.num_tokens] = self._buffer[:, : self.num_tokens]
            self._buffer = grown
        self._buffer[:, self.num_tokens : total] = vectors
        self.num_tokens = total
