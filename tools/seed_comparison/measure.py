"""Measures both caches on the same inputs.  Runs where VeloxQuant-MLX can be imported.

Reads {num_seeds} from standard input and writes a JSON line for each case to standard output.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np
from veloxquant_mlx.cache.base import KVCacheConfig
from veloxquant_mlx.cache.turboquant_cache import TurboQuantKVCache

from tools.seed_comparison.cases import INPUTS, WIDTHS, Inputs
from tqstore.seeds import VeloxTurboQuantKVCache


@dataclass(frozen=True)
class Comparison:
    """Means over seeds of |output - exact| / |exact|; `margin` is theirs less ours in s.e."""

    inputs: str
    method: str
    bits: int
    ours: float
    theirs: float
    margin: float
    our_bytes: float
    their_bytes: float


def compare(inputs: Inputs, method: str, bits: int, num_seeds: int) -> Comparison:
    """One case over `num_seeds` draws of vectors and rotations."""
    runs = [_errors(inputs, method, bits, seed) for seed in range(num_seeds)]
    ours, theirs, our_bytes, their_bytes = np.array(runs).T
    # An output that is not finite is as wrong as none at all.
    theirs = np.where(np.isfinite(theirs), theirs, 1e3)
    differences = theirs - ours
    error = differences.std(ddof=1) / np.sqrt(num_seeds)
    return Comparison(
        inputs=inputs.name,
        method=method,
        bits=bits,
        ours=float(ours.mean()),
        theirs=float(theirs.mean()),
        margin=float(differences.mean() / error),
        our_bytes=float(our_bytes.mean()),
        their_bytes=float(their_bytes.mean()),
    )


def _errors(inputs: Inputs, method: str, bits: int, seed: int) -> tuple[float, float, float, float]:
    """(our error, their error, our bytes a token, their bytes a token)."""
    queries, keys, values = inputs.arrays(seed)
    config = KVCacheConfig(
        method=method,
        head_dim=inputs.head_dim,
        bit_width_inlier=bits,
        seed=seed,
        capacity=inputs.tokens,
        **inputs.options,
    )
    ours, theirs = VeloxTurboQuantKVCache(config), TurboQuantKVCache(config)
    for key, value in zip(keys, values, strict=True):
        for cache in (ours, theirs):
            cache.append_key(key)
            cache.append_value(value)
    exact = exact_attention(
        *(np.array(side).astype(np.float64) for side in (queries, keys, values))
    )
    errors = []
    for cache in (ours, theirs):
        outputs = mx.stack([cache.attend(query) for query in queries]).astype(mx.float32)
        errors.append(float(np.linalg.norm(np.array(outputs) - exact) / np.linalg.norm(exact)))
    sizes = [cache.memory_bytes() / inputs.tokens for cache in (ours, theirs)]
    return errors[0], errors[1], sizes[0], sizes[1]


def exact_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float64 [rows, dim] over all keys."""
    scores = queries @ keys.T / np.sqrt(keys.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ values


def main() -> None:
    num_seeds = json.load(sys.stdin)["num_seeds"]
    for inputs in INPUTS:
        for method, widths in WIDTHS.items():
            for bits in widths:
                print(json.dumps(asdict(compare(inputs, method, bits, num_seeds))), flush=True)


if __name__ == "__main__":
    main()
