"""Lloyd-Max codebooks and best uniform steps for a coordinate of a random unit vector.

Owns the exact density of one coordinate t of a uniform point of the sphere in R^d,
    f(t) = G(d/2) / (sqrt(pi) G((d-1)/2)) (1 - t^2)^((d-3)/2)        (TurboQuant, Lemma 1)
and its optimal scalar quantizers, in float64 over numpy alone.  Knows no array of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, lgamma, log, pi, sqrt

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
# Beyond this many standard deviations (1/sqrt(d)) the density is below 1e-35.
_TAIL_SIGMAS = 13.0


@dataclass(frozen=True)
class Codebook:
    """Levels ascending and symmetric, float64 [2^bits]; thresholds midway between neighbours.

    `distortion` is the mean squared error of one coordinate: `dim * distortion` of a unit vector.
    """

    levels: np.ndarray
    distortion: float

    @property
    def thresholds(self) -> np.ndarray:
        """float64 [2^bits - 1]; a coordinate above `thresholds[i]` has a code above `i`."""
        return np.asarray((self.levels[1:] + self.levels[:-1]) / 2)


@lru_cache(maxsize=512)
def lloyd_max(dim: int, bits: int) -> Codebook:
    """The optimal quantizer of 2^bits levels for a coordinate of a unit vector in R^dim."""
    if dim == 1:  # the density is two point masses: any codebook that holds -1 and 1 is exact
        odd = np.arange(1 - 2**bits, 2**bits, 2)
        return Codebook(odd / (2**bits - 1), 0.0)
    density = _Density(dim)
    levels = _stationary_levels(density, density.companded(2 ** (bits - 1)))
    distortion = _distortion(density, levels)
    return Codebook(np.concatenate([-levels[::-1], levels]), distortion)


@lru_cache(maxsize=512)
def uniform_step(dim: int, bits: int) -> tuple[float, float]:
    """(step, distortion) of the best uniform quantizer: levels (code - (2^bits - 1) / 2) * step."""
    if dim == 1:
        return 2.0 / (2**bits - 1), 0.0
    density = _Density(dim)
    low, high = 1e-3 / 2**bits / sqrt(dim), 4.0 / 2 ** (bits - 1) / sqrt(dim)
    ratio = (sqrt(5) - 1) / 2
    for _ in range(60):  # golden section
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if _uniform_distortion(density, bits, left) < _uniform_distortion(density, bits, right):
            high = right
        else:
            low = left
    step = (low + high) / 2
    return step, _uniform_distortion(density, bits, step)


def _uniform_distortion(density: _Density, bits: int, step: float) -> float:
    half = 2 ** (bits - 1)
    edges = np.minimum(np.concatenate([np.arange(half) * step, [1.0]]), 1.0)
    return _cell_distortion(density, edges, (np.arange(half) + 0.5) * step)


def _stationary_levels(density: _Density, levels: np.ndarray) -> np.ndarray:
    """Positive levels that are the centroids of their cells, by Newton's method.

    Newton alone may run to a saddle, so a step that does not lower the distortion is replaced by
    one of Lloyd's, which always does.  RuntimeError if 1,000 steps are not enough.
    """
    distortion = _distortion(density, levels)
    for _ in range(1000):
        mass, moment = density.cells(_edges(levels))
        candidate = levels - _newton_step(density, levels, mass, moment)
        change = np.max(np.abs(candidate - levels))
        if change < 1e-13 * levels[-1]:
            return np.asarray(candidate)
        is_ascending = np.all(np.diff(candidate, prepend=0.0) > 0) and candidate[-1] < 1
        # Close to the solution distortions differ by less than rounding: trust Newton there.
        is_close = change < 1e-4 * levels[0]
        if not is_ascending or not (is_close or _distortion(density, candidate) < distortion):
            candidate = moment / mass
        levels, distortion = candidate, _distortion(density, candidate)
    raise RuntimeError(
        f"the codebook of {2 * len(levels)} levels, dim {density.dim} did not converge"
    )


def _edges(levels: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]])


def _distortion(density: _Density, levels: np.ndarray) -> float:
    return _cell_distortion(density, _edges(levels), levels)


def _cell_distortion(density: _Density, edges: np.ndarray, levels: np.ndarray) -> float:
    """Mean squared error when |t| in cell i decodes to levels[i]; 1/dim is the mean of t^2."""
    mass, moment = density.cells(edges)
    return float(1 / density.dim - 2 * np.sum(2 * levels * moment - levels**2 * mass))


def _newton_step(
    density: _Density, levels: np.ndarray, mass: np.ndarray, moment: np.ndarray
) -> np.ndarray:
    """Newton's step for g_i = integral over cell i of (t - level_i) f(t) = 0, all i at once."""
    thresholds = (levels[1:] + levels[:-1]) / 2
    # A threshold moves by half of each neighbouring level; the cell's mass moves with it.
    flow = (levels[1:] - levels[:-1]) / 4 * density.at(thresholds)
    diagonal = -mass
    diagonal[:-1] += flow
    diagonal[1:] += flow
    jacobian = np.diag(diagonal) + np.diag(flow, 1) + np.diag(flow, -1)
    return np.asarray(np.linalg.solve(jacobian, moment - levels * mass))


class _Density:
    """f(t) for one dim >= 2, integrated over the angle: t = sin(a), f(t) dt = c cos(a)^(d-2) da."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._log_norm = lgamma(dim / 2) - lgamma((dim - 1) / 2) - log(pi) / 2
        self._last_angle = min(pi / 2, _TAIL_SIGMAS / sqrt(dim))

    def at(self, t: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(self._log_norm + (self.dim - 3) / 2 * np.log1p(-t * t)))

    def cells(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(integral of f, integral of t f) over each cell between ascending edges in [0, 1]."""
        angles = np.minimum(np.arcsin(edges), self._last_angle)
        middle, radius = (angles[1:] + angles[:-1]) / 2, (angles[1:] - angles[:-1]) / 2
        nodes = middle[:, None] + radius[:, None] * _NODES  # [cells, nodes]
        log_cos = np.log1p(-2.0 * np.sin(nodes / 2) ** 2)  # exact where cos is almost 1
        weighted = np.exp((self.dim - 2) * log_cos) * _WEIGHTS
        scale = exp(self._log_norm) * radius
        return scale * weighted.sum(1), scale * (weighted * np.sin(nodes)).sum(1)

    def companded(self, count: int) -> np.ndarray:
        """`count` positive levels at the quantiles of f^(1/3): optimal for many levels."""
        angles = np.linspace(0, self._last_angle, 20_001)
        middle = (angles[1:] + angles[:-1]) / 2
        cumulative = np.concatenate([[0.0], np.cumsum(np.cos(middle) ** (self.dim / 3))])
        quantiles = (np.arange(count) + 0.5) / count * cumulative[-1]
        return np.asarray(np.sin(np.interp(quantiles, cumulative, angles)))
