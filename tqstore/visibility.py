"""Which positions the queries of one call may see: causality, windows and sinks.

Plain arithmetic over positions; owns no keys and no scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class View:
    """What the queries of one call may see.

    The `num_queries` queries stand at the sequence's last positions.  A query at position p sees
    keys at positions <= p and, with a window, > p - window or < sink_tokens.
    """

    num_tokens: int
    num_queries: int
    window: int | None = None
    sink_tokens: int = 0

    @property
    def first_query(self) -> int:
        return self.num_tokens - self.num_queries

    @property
    def window_start(self) -> int:
        """First position that the window of the first query reaches."""
        return 0 if self.window is None else max(0, self.first_query - self.window + 1)

    def sees_all(self, first: int, last: int) -> bool:
        """Whether every query sees every position of first..last-1."""
        below = last - 1 <= self.first_query
        if self.window is None:
            return below
        return below and (last <= self.sink_tokens or first > self.num_tokens - 1 - self.window)

    def mask(self, positions: npt.NDArray[np.int64]) -> mx.array:
        """positions [...] -> bool [num_queries, ...]: what each query sees."""
        window, sinks = self._within_reach
        keys = mx.array(positions.astype(np.int32))[None]
        queries = mx.arange(self.first_query, self.num_tokens, dtype=mx.int32)
        queries = queries.reshape(-1, *([1] * positions.ndim))
        visible = keys <= queries
        if window is not None:
            visible &= (keys > queries - window) | (keys < sinks)
        return visible

    @property
    def _within_reach(self) -> tuple[int | None, int]:
        """Window and sinks no larger than the sequence, so that devices can count in int32."""
        window = None if self.window is None else min(self.window, self.num_tokens)
        return window, min(self.sink_tokens, self.num_tokens)


def visible_blocks(view: View, num_blocks: int, page_tokens: int) -> npt.NDArray[np.int64]:
    """Indices of the blocks, of `num_blocks`, of which some query sees some token."""
    blocks = np.arange(min(num_blocks, -(-view.num_tokens // page_tokens)), dtype=np.int64)
    if view.window is None:
        return blocks
    reached = (blocks + 1) * page_tokens > view.window_start
    return blocks[reached | (blocks * page_tokens < view.sink_tokens)]
