"""Codebooks against published tables, closed forms and an independent integral."""

from math import sqrt

import numpy as np
import pytest

from tests.quant import oracle
from tqstore.quant.codebook import lloyd_max, uniform_step

NORMAL_DIM = 1_000_000  # the density is N(0, 1/dim) to within 1e-6


def positive_half(levels: np.ndarray) -> np.ndarray:
    return levels[len(levels) // 2 :]


@pytest.mark.parametrize("bits", oracle.NORMAL_CENTROIDS)
def test_normal_limit_has_the_published_centroids_and_thresholds(bits: int) -> None:
    codebook = lloyd_max(NORMAL_DIM, bits)
    scale = sqrt(NORMAL_DIM)
    levels = positive_half(codebook.levels) * scale
    np.testing.assert_allclose(levels, oracle.NORMAL_CENTROIDS[bits], atol=1e-5)
    if bits in oracle.NORMAL_THRESHOLDS:
        thresholds = codebook.thresholds[2 ** (bits - 1) - 1 :] * scale
        np.testing.assert_allclose(thresholds, oracle.NORMAL_THRESHOLDS[bits], atol=1e-5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_normal_limit_has_the_published_distortion(bits: int) -> None:
    measured = lloyd_max(NORMAL_DIM, bits).distortion * NORMAL_DIM
    assert measured == pytest.approx(oracle.NORMAL_DISTORTION[bits], rel=1e-3)


@pytest.mark.parametrize("bits", oracle.NORMAL_UNIFORM)
def test_normal_limit_has_the_published_uniform_step(bits: int) -> None:
    step, distortion = uniform_step(NORMAL_DIM, bits)
    expected_step, expected_distortion = oracle.NORMAL_UNIFORM[bits]
    assert step * sqrt(NORMAL_DIM) == pytest.approx(expected_step, rel=2e-3)
    assert distortion * NORMAL_DIM == pytest.approx(expected_distortion, rel=5e-3)


@pytest.mark.parametrize("dim", oracle.BETA_DISTORTION)
def test_exact_beta_distortion(dim: int) -> None:
    measured = [dim * lloyd_max(dim, bits).distortion for bits in (1, 2, 3, 4)]
    np.testing.assert_allclose(measured, oracle.BETA_DISTORTION[dim], atol=6e-6)


@pytest.mark.parametrize("bits", oracle.BETA_128_CENTROIDS)
def test_exact_beta_centroids(bits: int) -> None:
    levels = positive_half(lloyd_max(128, bits).levels) * sqrt(128)
    np.testing.assert_allclose(levels, oracle.BETA_128_CENTROIDS[bits], atol=6e-6)


@pytest.mark.parametrize("dim", [2, 3, 5, 8, 64, 100, 128, 576])
@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_levels_are_the_centroids_of_their_cells(dim: int, bits: int) -> None:
    codebook = lloyd_max(dim, bits)
    levels = codebook.levels
    cell = np.min(np.diff(levels))
    np.testing.assert_allclose(oracle.centroids(levels, dim), levels, atol=2e-2 * cell)
    assert dim * codebook.distortion == pytest.approx(oracle.distortion(levels, dim), rel=2e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_plain_lloyd_iteration_arrives_at_the_same_codebook(bits: int) -> None:
    np.testing.assert_allclose(lloyd_max(128, bits).levels, oracle.lloyd(128, bits), atol=2e-6)


@pytest.mark.parametrize("bits", range(1, 9))
def test_closed_forms_of_small_dimensions(bits: int) -> None:
    cells = 2**bits
    assert {-1.0, 1.0} <= set(lloyd_max(1, bits).levels)  # t is -1 or 1
    even = (2 * np.arange(cells) + 1) / cells - 1  # in R^3 a coordinate is uniform on [-1, 1]
    np.testing.assert_allclose(lloyd_max(3, bits).levels, even, atol=1e-12)
    assert lloyd_max(3, bits).distortion == pytest.approx((2 / cells) ** 2 / 12, rel=1e-9)
    if bits == 1:
        assert lloyd_max(2, 1).levels[1] == pytest.approx(2 / np.pi, rel=1e-12)  # arcsine


@pytest.mark.parametrize("dim", [1, 2, 8, 64, 80, 128, 576, 16384])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks_are_symmetric_ascending_and_inside_the_interval(dim: int, bits: int) -> None:
    levels = lloyd_max(dim, bits).levels
    assert levels.shape == (2**bits,)
    assert np.all(np.diff(levels) > 0)
    assert np.array_equal(levels, -levels[::-1])
    assert np.abs(levels).max() <= 1


@pytest.mark.parametrize("bits", range(1, 9))
def test_distortion_is_within_the_papers_bounds(bits: int) -> None:
    distortion = 128 * lloyd_max(128, bits).distortion
    assert 4.0**-bits <= distortion <= sqrt(3) * np.pi / 2 * 4.0**-bits
