"""What both caches are given: kinds of keys and queries, and the configurations to compare.

Owns the random numbers; float16 arrays, as the seed takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

# Every width that VeloxQuant-MLX 0.94.15 can pack.
WIDTHS = {"turboquant_mse": (1, 2, 3, 4), "turboquant_prod": (1, 2, 3, 4, 5)}
NUM_OUTLIERS = 4


@dataclass(frozen=True)
class Inputs:
    """One head: keys and values [tokens, dim], queries [rows, dim]; softmax logits of `spread`."""

    name: str
    head_dim: int = 128
    tokens: int = 256
    rows: int = 16
    spread: float = 1.0  # standard deviation of a row's logits
    norm_spread: float = 0.0  # of the logarithm of the keys' norms
    outlier_gain: float = 1.0  # of NUM_OUTLIERS channels of the keys
    options: dict[str, Any] = field(default_factory=dict)  # of both configurations

    def arrays(self, seed: int) -> tuple[mx.array, mx.array, mx.array]:
        """(queries, keys, values)."""
        rng = np.random.default_rng(seed)
        keys = rng.normal(size=(self.tokens, self.head_dim))
        keys *= np.exp(self.norm_spread * rng.normal(size=(self.tokens, 1)))
        keys[:, rng.choice(self.head_dim, NUM_OUTLIERS, replace=False)] *= self.outlier_gain
        values = rng.normal(size=(self.tokens, self.head_dim))
        queries = rng.normal(size=(self.rows, self.head_dim))
        logits = queries @ keys.T / np.sqrt(self.head_dim)
        queries *= self.spread / logits.std(axis=1, keepdims=True)
        return tuple(mx.array(side.astype(np.float16)) for side in (queries, keys, values))


TWO_STREAMS = {"enable_outlier_two_stream": True, "n_outlier_channels": NUM_OUTLIERS}
INPUTS = (
    Inputs("normal"),
    Inputs("normal, d=64", head_dim=64),
    Inputs("normal, d=256", head_dim=256),
    Inputs("peaked", spread=3.0),
    Inputs("norms vary", norm_spread=0.7),
    Inputs("outliers", outlier_gain=20.0),
    Inputs("outliers, two streams", outlier_gain=20.0, options=TWO_STREAMS),
)
