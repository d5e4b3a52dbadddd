"""Packing against numpy's packbits and against MLX's own quantized layout."""

import mlx.core as mx
import numpy as np
import pytest

from tests.quant import oracle
from tqstore.quant import bitpack

DIMS = (1, 3, 8, 31, 64, 80, 96, 100, 112, 128, 192, 256, 576)


def random_codes(rows: int, dim: int, bits: int) -> np.ndarray:
    return np.random.default_rng(dim * 16 + bits).integers(0, 2**bits, (rows, dim), dtype=np.uint8)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim", DIMS)
def test_streams_are_lsb_first_and_come_back(dim: int, bits: int) -> None:
    codes = random_codes(7, dim, bits)
    packed = bitpack.pack(mx.array(codes), bits)
    expected = oracle.pack_bits(codes, bits)
    assert packed.shape == (7, bitpack.row_nbytes(dim, bits)) == expected.shape
    assert np.array_equal(np.array(packed), expected)
    assert np.array_equal(np.array(bitpack.unpack(packed, bits, dim)), codes)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_mlx_reads_our_streams(dim: int, bits: int) -> None:
    codes = random_codes(5, dim, bits)
    words = bitpack.as_words(bitpack.pack(mx.array(codes), bits))
    assert words is not None
    ones = mx.ones((5, dim // 32))
    read = mx.dequantize(words, ones, mx.zeros_like(ones), group_size=32, bits=bits)
    assert np.array_equal(np.array(read), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_we_read_mlx_streams(bits: int) -> None:
    x = mx.random.normal((6, 128), key=mx.random.key(1))
    words, scales, biases = mx.quantize(x, group_size=64, bits=bits)
    codes = bitpack.unpack(words, bits, 128).astype(mx.float32).reshape(6, 2, 64)
    ours = (codes * scales[..., None] + biases[..., None]).reshape(6, 128)
    theirs = mx.dequantize(words, scales, biases, group_size=64, bits=bits)
    assert mx.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("bits", range(1, 9))
def test_strided_words_of_a_pool_are_read_in_place(bits: int) -> None:
    codes = random_codes(4 * 3, 128, bits).reshape(4, 3, 128)
    packed = np.stack([oracle.pack_bits(page, bits) for page in codes])
    pool = np.full((4, 3 * packed.shape[-1] + 40), 255, np.uint8)
    pool[:, 16 : 16 + 3 * packed.shape[-1]] = packed.reshape(4, -1)
    words = mx.array(pool.view(np.uint32))
    row_words = packed.shape[-1] // 4
    view = mx.as_strided(words, (4, 3, row_words), (words.shape[1], row_words, 1), 4)
    assert np.array_equal(np.array(bitpack.unpack(view, bits, 128)), codes)
    assert mx.array_equal(bitpack.unpack(bitpack.as_bytes(view), bits, 128), mx.array(codes))


def test_rows_that_are_no_whole_words_have_no_words() -> None:
    assert bitpack.as_words(mx.zeros((2, 10), mx.uint8)) is None
