"""Levels by polynomial against the table they come from."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tqstore.quant.codebook import lloyd_max
from tqstore.quant.level_polynomial import MAX_BITS, LevelPolynomial


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64, 80, 96, 128, 256, 1024])
@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_is_within_a_few_ulps_of_every_level(bits: int, dim: int) -> None:
    levels = lloyd_max(dim, bits).levels
    found = np.array(LevelPolynomial(levels)(mx.arange(2**bits).astype(mx.uint8)))
    assert found.dtype == np.float32
    assert np.abs(found / levels - 1).max() < 3e-7
    assert np.array_equal(found, -found[::-1])  # exactly symmetric
    assert (np.diff(found) > 0).all()


@pytest.mark.parametrize("bits", range(2, MAX_BITS + 1))
def test_codes_of_any_layout(bits: int) -> None:
    levels = lloyd_max(64, bits).levels
    codes = mx.random.randint(0, 2**bits, (3, 4, 40), key=mx.random.key(bits)).astype(mx.uint8)
    view = codes[:, 1:, 5:37].swapaxes(0, 2)
    expected = levels[np.array(view)]
    assert np.allclose(np.array(LevelPolynomial(levels)(view)), expected, rtol=3e-7, atol=0)
