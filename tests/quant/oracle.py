"""An independent float64 numpy implementation of what the paper says, to hold the codecs against.

Imports nothing of the product.  Slow and plain on purpose: brute-force integrals on a grid, dense
matrices, explicit sums.
"""

from __future__ import annotations

from functools import cache
from math import lgamma, pi, sqrt

import numpy as np

GRID = 400_001

# turboquant-facts: Lloyd-Max for N(0, 1), positive half.
NORMAL_CENTROIDS = {
    1: [0.797885],
    2: [0.452780, 1.510418],
    3: [0.245094, 0.756005, 1.343909, 2.151946],
    4: [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590],
    5: [
        *[0.065890, 0.198052, 0.331378, 0.466700, 0.604934, 0.747136, 0.894565, 1.048783],
        *[1.211804, 1.386340, 1.576228, 1.787233, 2.028728, 2.317739, 2.691120, 3.260732],
    ],
}
NORMAL_THRESHOLDS = {
    1: [0.0],
    2: [0.0, 0.981599],
    3: [0.0, 0.500550, 1.049957, 1.747927],
    4: [0.0, 0.258222, 0.522404, 0.799550, 1.099286, 1.437139, 1.843532, 2.400803],
}
NORMAL_DISTORTION = {
    1: 0.363380,
    2: 0.117482,
    3: 0.034548,
    4: 0.009501,
    5: 0.0025047,
    6: 0.00064424,
    7: 0.00016348,
    8: 0.000041185,
}
NORMAL_UNIFORM = {  # bits: (step, distortion)
    1: (1.5958, 0.36338),
    2: (0.99565, 0.118846),
    3: (0.58605, 0.037440),
    4: (0.33525, 0.011543),
    5: (0.18818, 0.003495),
    6: (0.10411, 0.001040),
    8: (0.03079, 0.000088),
}
BETA_128_CENTROIDS = {  # times sqrt(128)
    2: [0.45245, 1.50519],
    3: [0.24442, 0.75333, 1.33660, 2.13147],
    4: [0.12787, 0.38638, 0.65362, 0.93710, 1.24777, 1.60434, 2.04593, 2.68886],
}
BETA_DISTORTION = {  # dim: for bits 1..4
    32: (0.35336, 0.11160, 0.03226, 0.00877),
    64: (0.35839, 0.11453, 0.03339, 0.00913),
    80: (0.35939, 0.11511, 0.03362, 0.00920),
    96: (0.36006, 0.11551, 0.03377, 0.00925),
    128: (0.36089, 0.11600, 0.03397, 0.00931),
    192: (0.36172, 0.11649, 0.03416, 0.00938),
    256: (0.36214, 0.11674, 0.03426, 0.00941),
}


@cache
def density(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(t, weight): a coordinate of a random unit vector in R^dim, as masses on a fine grid."""
    edges = np.sin(np.linspace(-pi / 2, pi / 2, GRID))
    t = (edges[1:] + edges[:-1]) / 2
    log_norm = lgamma(dim / 2) - lgamma((dim - 1) / 2) - 0.5 * np.log(pi)
    weight = np.exp(log_norm + (dim - 3) / 2 * np.log1p(-t * t)) * np.diff(edges)
    return t, weight / weight.sum()


def distortion(levels: np.ndarray, dim: int) -> float:
    """dim times the mean squared error of one coordinate, nearest level."""
    t, weight = density(dim)
    return float(dim * np.sum(weight * (t - levels[nearest(t, levels)]) ** 2))


@cache
def _cumulative(dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(t, integral of f, integral of t f) up to each grid point."""
    t, weight = density(dim)
    return t, *(np.cumsum(w) - w / 2 for w in (weight, weight * t))


def centroids(levels: np.ndarray, dim: int) -> np.ndarray:
    """Mean of the density over each level's cell: equal to the level for a Lloyd-Max codebook."""
    t, mass, moment = _cumulative(dim)
    thresholds = (levels[1:] + levels[:-1]) / 2
    cell_mass = np.diff(np.interp(thresholds, t, mass), prepend=0.0, append=1.0)
    return np.diff(np.interp(thresholds, t, moment), prepend=0.0, append=0.0) / cell_mass


def nearest(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Index of the nearest of ascending levels."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, x)


def lloyd(dim: int, bits: int, iterations: int = 500) -> np.ndarray:
    """Levels [2^bits] by plain Lloyd iteration from quantiles."""
    t, weight = density(dim)
    quantiles = (np.arange(2**bits) + 0.5) / 2**bits
    levels = np.interp(quantiles, np.cumsum(weight), t)
    for _ in range(iterations):
        levels = centroids(levels, dim)
    return levels


def mse_decode(x: np.ndarray, rotation: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """TurboQuant-mse of the rows of x [n, dim] with the paper's norm as scale: x_hat [n, dim]."""
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    rotated = (x / norm) @ rotation.T
    return norm * (levels[nearest(rotated, levels)] @ rotation)


def prod_decode(
    x: np.ndarray,
    rotation: np.ndarray,
    sketch: np.ndarray,
    levels: np.ndarray | None,
    is_orthogonal: bool,
) -> np.ndarray:
    """TurboQuant-prod; `sketch` acts on un-rotated residuals, rows orthonormal or normal."""
    dim = x.shape[1]
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    unit = x / norm
    coarse = np.zeros_like(unit) if levels is None else mse_decode(unit, rotation, levels)
    residual = unit - coarse
    signs = np.where(residual @ sketch.T >= 0, 1.0, -1.0)
    # Orthonormal rows: dim * E|t| is how long S^T sign(S r) is along r, whatever r's direction.
    t, weight = density(dim)
    gain = 1 / (dim * np.sum(weight * np.abs(t))) if is_orthogonal else sqrt(pi / 2) / dim
    correction = gain * np.linalg.norm(residual, axis=1, keepdims=True) * (signs @ sketch)
    return norm * (coarse + correction)


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, dim] -> LSB-first byte streams [rows, ceil(dim * bits / 8)]."""
    planes = (codes[..., None].astype(np.uint16) >> np.arange(bits)) & 1
    return np.packbits(planes.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little")
