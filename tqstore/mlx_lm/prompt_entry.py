"""What the caches of a prompt-cache file hold: dense keys and values, or states kept as they are.

Pure values and their way back into the installed mlx-lm's own objects.  Does not own how a state is
read from a file (prompt_state's), nor paging.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache


class Layout(Enum):
    """Where a file keeps the numbers of a state: how mlx-lm wrote it."""

    META_STATE = "mlx-lm before 0.32"
    SCALARS = "mlx-lm 0.32"


@dataclass(frozen=True)
class DenseEntry:
    """Keys [kv_heads, n, key_dim] and values [.., value_dim] of a layer, in temporal order.

    They are those of the first `keep` and the last n - `keep` of `offset` tokens.  `window`: what a
    query sees besides the kept ones, None for all.  `bits`: of the quantized cache they were
    decoded from, or None.
    """

    entry: int
    part: int | None
    keys: mx.array
    values: mx.array
    offset: int
    window: int | None = None
    keep: int = 0
    bits: int | None = None

    @property
    def num_kept(self) -> int:
        return int(self.keys.shape[1])

    @property
    def first_kept(self) -> int:
        """Position from which on all tokens are there."""
        return 0 if self.num_kept == self.offset else self.offset - (self.num_kept - self.keep)

    def as_cache(self) -> Any:
        """The installed mlx-lm's own object with this state."""
        if self.window is None:
            leaf: Any = KVCache()  # type: ignore[no-untyped-call]
        else:
            size = self.window + self.keep
            leaf = RotatingKVCache(max_size=size, keep=self.keep)  # type: ignore[no-untyped-call]
            leaf._idx = self.num_kept
        leaf.keys, leaf.values, leaf.offset = self.keys[None], self.values[None], self.offset
        return leaf


@dataclass(frozen=True)
class OwnState:
    """A cache that is not keys and values by position, as the installed mlx-lm's own object."""

    entry: int
    part: int | None
    leaf: Any


Entry = DenseEntry | OwnState
