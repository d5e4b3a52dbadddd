"""float16 widened by integer operations, against numpy for every bit pattern there is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tqstore.quant.widen import widened


def test_every_finite_float16_widens_to_the_same_number() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    expected = patterns.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    out = np.array(widened(mx.array(patterns).view(mx.float16)))
    assert np.array_equal(out[finite].view(np.uint32), expected[finite].view(np.uint32))


def test_strided_views_widen_like_copies() -> None:
    x = mx.random.normal((6, 40), key=mx.random.key(1)).astype(mx.float16)
    view = x[:, 3:19].reshape(6, 4, 4).swapaxes(1, 2)
    assert mx.array_equal(widened(view), view.astype(mx.float32))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_other_dtypes_too(dtype: mx.Dtype) -> None:
    x = mx.random.normal((8, 8), key=mx.random.key(2)).astype(dtype)
    assert widened(x).dtype == mx.float32
    assert mx.array_equal(widened(x), x.astype(mx.float32))
