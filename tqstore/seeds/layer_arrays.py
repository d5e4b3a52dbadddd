"""What arrays a cache of layers takes from its caller, checked, and gives back.

Owns shapes and dtypes; keeps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.errors import InvalidInput
from tqstore.seeds.bounds import check_integer

Vectors: TypeAlias = npt.NDArray[np.floating] | mx.array


@dataclass(frozen=True)
class LayerArrays:
    """Which arrays a cache takes: [head_dim] or [n, head_dim], after [n_heads] if that is given."""

    n_layers: int
    head_dim: int
    n_heads: int | None

    def __post_init__(self) -> None:
        check_integer("n_layers", self.n_layers, 1, 1 << 12)
        check_integer("head_dim", self.head_dim, 1, 1 << 14)
        if self.n_heads is not None:
            check_integer("n_heads", self.n_heads, 1, 1 << 12)

    @property
    def heads(self) -> int:
        return 1 if self.n_heads is None else self.n_heads

    @property
    def _leading(self) -> tuple[int, ...]:
        return () if self.n_heads is None else (self.n_heads,)

    def check_layer(self, layer: int) -> None:
        check_integer("layer", layer, 0, self.n_layers - 1)

    def checked(self, name: str, vectors: Vectors) -> npt.NDArray[np.floating]:
        """-> [heads, n, head_dim], finite."""
        array = as_numpy(name, vectors)
        one = (*self._leading, self.head_dim)
        rows = array[..., None, :] if array.shape == one else array
        if rows.ndim < 2 or rows.shape != (*self._leading, rows.shape[-2], self.head_dim):
            many = [*self._leading, "n", self.head_dim]
            raise InvalidInput(f"{name} must be {list(one)} or {many}, not {list(array.shape)}")
        if rows.size == 0 or not np.isfinite(rows).all():
            raise InvalidInput(f"{name} is empty or has inf or NaN")
        return rows.reshape(self.heads, -1, self.head_dim)

    def shown(self, rows: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """[heads, n, head_dim] as the caller sees it: without the heads that were not asked for."""
        return rows[0] if self.n_heads is None else rows


def as_numpy(name: str, vectors: Vectors) -> npt.NDArray[np.floating]:
    """The same numbers for numpy; InvalidInput for anything but an array of floats."""
    if isinstance(vectors, mx.array):
        if vectors.dtype == mx.bfloat16:  # which numpy lacks
            vectors = vectors.astype(mx.float32)
        vectors = np.array(vectors)
    if not isinstance(vectors, np.ndarray) or not np.issubdtype(vectors.dtype, np.floating):
        kind = getattr(vectors, "dtype", type(vectors).__name__)
        raise InvalidInput(f"{name} must be an array of floats, not {kind}")
    return vectors


def check_same_tokens(num_keys: int, num_values: int) -> None:
    """InvalidInput unless both are the same."""
    if num_keys != num_values:
        raise InvalidInput(f"{num_keys} keys but {num_values} values", doing="appending tokens")
