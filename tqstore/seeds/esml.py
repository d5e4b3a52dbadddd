"""ESML's `TurboQuantKVCache`: keys and values of a whole model at `mse`.

Owns that public interface: numpy or MLX arrays in, numpy arrays out, statistics that are true.  All
of the mathematics is tqstore.quant's; docs/seeds.md says where the original was wrong.  Not paged
and not stored: that is tqstore.KVCache.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.errors import InvalidInput
from tqstore.quant.registry import key_codec, value_codec
from tqstore.seeds.bounds import check_integer
from tqstore.seeds.layer_arrays import LayerArrays, Vectors, check_same_tokens
from tqstore.seeds.token_streams import TokenStreams
from tqstore.spec import CodecSpec, PageSpec

FLOAT16_NBYTES = 2
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class CacheStats:
    """Bytes of what is held, and of the same vectors as float16."""

    compressed_bytes: int = 0
    uncompressed_bytes: int = 0
    n_tokens: int = 0
    n_layers: int = 0

    @property
    def compression_ratio(self) -> float:
        """Uncompressed over compressed; 0.0 of an empty cache."""
        if self.compressed_bytes == 0:
            return 0.0
        return self.uncompressed_bytes / self.compressed_bytes

    @property
    def savings_mb(self) -> float:
        """Mebibytes saved."""
        return (self.uncompressed_bytes - self.compressed_bytes) / MEBIBYTE


class TurboQuantKVCache:
    """Keys and values of `n_layers` layers, packed at `bits` a coordinate.

    Any head_dim.  With `n_heads` arrays have a leading axis of heads, each head scaled by itself.
    What is stored does not depend on how appends were split.  One thread at a time.

    >>> import numpy as np
    >>> from tqstore.seeds import TurboQuantKVCache
    >>> cache = TurboQuantKVCache(n_layers=2, head_dim=128, bits=3)
    >>> rng = np.random.default_rng(0)
    >>> cache.append(layer=0, k_vec=rng.normal(size=128), v_vec=rng.normal(size=128))
    >>> cache.get_keys(0).shape, round(cache.stats.compression_ratio, 2)
    ((1, 128), 5.02)
    """

    def __init__(
        self,
        n_layers: int,
        head_dim: int,
        bits: int = 3,
        rotation_seed: int = 42,
        n_heads: int | None = None,
    ) -> None:
        """`bits` from 1 to 8.  Raises InvalidInput."""
        self._arrays = LayerArrays(n_layers, head_dim, n_heads)
        check_integer("bits", bits, 1, 8)
        check_integer("rotation_seed", rotation_seed, 0, (1 << 63) - 1)
        self.n_layers, self.head_dim, self.n_heads = n_layers, head_dim, n_heads
        self.bits, self.rotation_seed = bits, rotation_seed
        mse = CodecSpec("mse", bits)
        page = PageSpec(self._arrays.heads, head_dim, head_dim, 1, mse, mse, "float32")
        sides = [codec(page, rotation_seed) for codec in (key_codec, value_codec)]
        self._keys, self._values = (
            [TokenStreams(codec, self._arrays.heads) for _ in range(n_layers)] for codec in sides
        )

    def append(self, layer: int, k_vec: Vectors, v_vec: Vectors) -> None:
        """One token, vectors [head_dim], or the next n, [n, head_dim]; [n_heads, ...] with heads.

        numpy or MLX floats.  InvalidInput for other shapes, for inf and NaN and for what float32
        cannot hold; nothing is changed then.
        """
        self._arrays.check_layer(layer)
        keys, values = (
            _as_float32(name, self._arrays.checked(name, vectors))
            for name, vectors in (("k_vec", k_vec), ("v_vec", v_vec))
        )
        check_same_tokens(keys.shape[1], values.shape[1])
        self._keys[layer].append(keys)
        self._values[layer].append(values)

    def get_keys(self, layer: int) -> npt.NDArray[np.floating]:
        """float32 [seq_len, head_dim], decoded; [n_heads, seq_len, head_dim] with heads."""
        return self._decoded(self._keys, layer)

    def get_values(self, layer: int) -> npt.NDArray[np.floating]:
        """The same of the values."""
        return self._decoded(self._values, layer)

    @property
    def seq_len(self) -> int:
        """Tokens of layer 0."""
        return self._keys[0].num_tokens

    def clear(self) -> None:
        """Forgets every token of every layer."""
        for rows in (*self._keys, *self._values):
            rows.clear()

    @property
    def stats(self) -> CacheStats:
        """Of all layers; `compressed_bytes` counts every stored byte: codes, scales, exponents."""
        sides = (*self._keys, *self._values)
        vector_nbytes = self._arrays.heads * self.head_dim * FLOAT16_NBYTES
        return CacheStats(
            compressed_bytes=sum(rows.nbytes for rows in sides),
            uncompressed_bytes=sum(rows.num_tokens for rows in sides) * vector_nbytes,
            n_tokens=self.seq_len,
            n_layers=self.n_layers,
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers: `stats.compressed_bytes` and the slots that are not taken yet."""
        return sum(rows.allocated_nbytes for rows in (*self._keys, *self._values))

    def _decoded(self, side: list[TokenStreams], layer: int) -> npt.NDArray[np.floating]:
        self._arrays.check_layer(layer)
        rows = side[layer]
        if rows.num_tokens == 0:
            empty = np.zeros((self._arrays.heads, 0, self.head_dim), np.float32)
            return self._arrays.shown(empty)
        return self._arrays.shown(np.array(rows.decode()))


def _as_float32(name: str, vectors: npt.NDArray[np.floating]) -> mx.array:
    with np.errstate(over="ignore"):
        narrow = vectors.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise InvalidInput(f"{name} has magnitudes that float32 cannot hold")
    return mx.array(narrow)
