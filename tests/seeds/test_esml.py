"""ESML's interface: shapes, heads, true bytes, the dense baseline, and what is refused."""

from __future__ import annotations

import copy
from math import ceil

import mlx.core as mx
import numpy as np
import pytest

from tests.quant.oracle import NORMAL_DISTORTION
from tqstore.errors import InvalidInput
from tqstore.seeds import CacheStats, TurboQuantKVCache, UncompressedKVCache

CACHES = [TurboQuantKVCache, UncompressedKVCache]


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("cache_type", CACHES)
def test_a_vector_is_a_token_of_its_layer(cache_type: type) -> None:
    cache = cache_type(n_layers=3, head_dim=64)
    for i in range(4):
        cache.append(layer=0, k_vec=normals(64, seed=i), v_vec=normals(64, seed=i + 10))
    cache.append(2, normals(64), normals(64))
    assert cache.get_keys(0).shape == cache.get_values(0).shape == (4, 64)
    assert cache.get_keys(1).shape == cache.get_values(1).shape == (0, 64)
    assert cache.get_keys(2).shape == (1, 64)
    assert cache.seq_len == 4
    cache.clear()
    assert cache.seq_len == 0
    assert cache.get_keys(0).shape == (0, 64)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3])
def test_vectors_come_back_within_the_codebooks_distortion(bits: int, norm: float) -> None:
    cache = TurboQuantKVCache(n_layers=1, head_dim=128, bits=bits)
    keys, values = normals(1000, 128) * norm, normals(1000, 128, seed=1) * norm
    cache.append(0, keys, values)
    for held, given in ((cache.get_keys(0), keys), (cache.get_values(0), values)):
        error = np.sum((held - given) ** 2) / np.sum(given**2)
        assert error == pytest.approx(NORMAL_DISTORTION[bits], rel=0.06)


@pytest.mark.parametrize("head_dim", [1, 8, 80, 96, 100, 256])
def test_any_head_dim(head_dim: int) -> None:
    cache = TurboQuantKVCache(n_layers=1, head_dim=head_dim, bits=4)
    keys = normals(50, head_dim)
    cache.append(0, keys, keys)
    assert np.sum((cache.get_keys(0) - keys) ** 2) < 0.03 * np.sum(keys**2)
    assert cache.stats.compressed_bytes == 50 * 2 * (ceil(head_dim * 4 / 8) + 3)


@pytest.mark.parametrize("cache_type", CACHES)
def test_a_head_axis(cache_type: type) -> None:
    cache = cache_type(n_layers=2, head_dim=64, n_heads=3)
    keys, values = normals(3, 10, 64), normals(3, 10, 64, seed=1)
    cache.append(1, keys[:, 0], values[:, 0])
    cache.append(1, keys[:, 1:], values[:, 1:])
    assert cache.get_keys(1).shape == (3, 10, 64)
    alone = cache_type(n_layers=1, head_dim=64)
    for head in range(3):
        alone.clear()
        alone.append(0, keys[head], values[head])
        np.testing.assert_array_equal(alone.get_keys(0), cache.get_keys(1)[head])
        np.testing.assert_array_equal(alone.get_values(0), cache.get_values(1)[head])


def test_appends_in_pieces_are_one_append() -> None:
    whole, pieces = (TurboQuantKVCache(n_layers=1, head_dim=64) for _ in range(2))
    keys, values = normals(300, 64), normals(300, 64, seed=1)
    whole.append(0, keys, values)
    for start, stop in ((0, 1), (1, 257), (257, 300)):
        pieces.append(0, keys[start:stop], values[start:stop])
    np.testing.assert_array_equal(whole.get_keys(0), pieces.get_keys(0))
    np.testing.assert_array_equal(whole.get_values(0), pieces.get_values(0))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("n_heads", [None, 4])
def test_statistics_are_the_bytes_that_are_held(bits: int, n_heads: int | None) -> None:
    cache = TurboQuantKVCache(n_layers=3, head_dim=128, bits=bits, n_heads=n_heads)
    assert cache.stats == CacheStats(n_layers=3)
    assert cache.stats.compression_ratio == 0.0
    leading = () if n_heads is None else (n_heads,)
    for layer, tokens in ((0, 20), (1, 20), (2, 7)):
        cache.append(layer, normals(*leading, tokens, 128), normals(*leading, tokens, 128))
    stats = cache.stats
    held = sum(
        buffer[: rows.num_tokens].nbytes
        for rows in (*cache._keys, *cache._values)
        for buffer in rows._buffers.values()
    )
    assert stats.compressed_bytes == held == 47 * 2 * (n_heads or 1) * (128 * bits // 8 + 3)
    assert stats.uncompressed_bytes == 47 * 2 * (n_heads or 1) * 128 * 2
    assert (stats.n_tokens, stats.n_layers) == (20, 3)
    assert stats.compression_ratio == stats.uncompressed_bytes / stats.compressed_bytes
    assert stats.savings_mb * 2**20 == stats.uncompressed_bytes - stats.compressed_bytes
    assert cache.allocated_bytes >= stats.compressed_bytes


def test_three_bits_are_five_times_smaller() -> None:
    cache = TurboQuantKVCache(n_layers=1, head_dim=128, bits=3)
    cache.append(0, normals(10, 128), normals(10, 128))
    assert cache.stats.compression_ratio == pytest.approx(256 / 51)


def test_the_rotation_seed_fixes_what_is_stored() -> None:
    keys = normals(5, 64)
    decoded = []
    for seed in (42, 42, 7):
        cache = TurboQuantKVCache(n_layers=1, head_dim=64, rotation_seed=seed)
        cache.append(0, keys, keys)
        decoded.append(cache.get_keys(0))
    np.testing.assert_array_equal(decoded[0], decoded[1])
    assert not np.array_equal(decoded[0], decoded[2])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_baseline_keeps_every_bit(dtype: type) -> None:
    cache = UncompressedKVCache(n_layers=2, head_dim=16)
    keys, values = normals(9, 16).astype(dtype), normals(9, 16, seed=1).astype(dtype)
    for key, value in zip(keys, values, strict=True):
        cache.append(1, key, value)
    assert cache.get_keys(1).dtype == dtype
    np.testing.assert_array_equal(cache.get_keys(1), keys)
    np.testing.assert_array_equal(cache.get_values(1), values)
    assert cache.memory_bytes == keys.nbytes + values.nbytes
    cache.get_keys(1)[:] = 0
    np.testing.assert_array_equal(cache.get_keys(1), keys)


def test_the_baseline_widens_rather_than_rounds() -> None:
    cache = UncompressedKVCache(n_layers=1, head_dim=4)
    narrow, wide = normals(2, 4).astype(np.float16), normals(2, 4)
    cache.append(0, narrow, narrow)
    cache.append(0, wide, wide)
    np.testing.assert_array_equal(cache.get_keys(0), np.concatenate([narrow, wide]))


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_mlx_arrays_are_taken(cache_type: type, dtype: mx.Dtype) -> None:
    cache = cache_type(n_layers=1, head_dim=64)
    keys = mx.random.normal((3, 64), key=mx.random.key(0)).astype(dtype)
    cache.append(0, keys, keys)
    same = cache_type(n_layers=1, head_dim=64)
    dense = np.array(keys.astype(mx.float32))
    same.append(0, dense, dense)
    np.testing.assert_array_equal(cache.get_keys(0), same.get_keys(0))


@pytest.mark.parametrize("cache_type", CACHES)
def test_a_deep_copy_goes_its_own_way(cache_type: type) -> None:
    cache = cache_type(n_layers=1, head_dim=32)
    cache.append(0, normals(3, 32), normals(3, 32))
    copied = copy.deepcopy(cache)
    copied.append(0, normals(2, 32), normals(2, 32))
    assert (cache.seq_len, copied.seq_len) == (3, 5)
    np.testing.assert_array_equal(copied.get_keys(0)[:3], cache.get_keys(0))


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize(
    ("layer", "keys", "values"),
    [
        (2, normals(8), normals(8)),
        (-1, normals(8), normals(8)),
        (0.0, normals(8), normals(8)),
        (0, normals(9), normals(8)),
        (0, normals(8), normals(7)),
        (0, normals(2, 8), normals(3, 8)),
        (0, normals(1, 2, 8), normals(1, 2, 8)),
        (0, normals(0, 8), normals(0, 8)),
        (0, np.zeros(8, int), np.zeros(8, int)),
        (0, [0.0] * 8, [0.0] * 8),
        (0, np.full(8, np.nan), normals(8)),
        (0, normals(8), np.full(8, -np.inf)),
    ],
)
def test_wrong_appends_change_nothing(
    cache_type: type, layer: object, keys: object, values: object
) -> None:
    cache = cache_type(n_layers=2, head_dim=8)
    cache.append(0, normals(8), normals(8))
    with pytest.raises(InvalidInput):
        cache.append(layer, keys, values)
    assert cache.get_keys(0).shape == cache.get_values(0).shape == (1, 8)
    assert cache.get_keys(1).shape == (0, 8)


def test_what_float32_cannot_hold_is_refused() -> None:
    cache = TurboQuantKVCache(n_layers=1, head_dim=8)
    with pytest.raises(InvalidInput, match="float32"):
        cache.append(0, normals(8), np.full(8, 1e300))
    assert cache.stats.compressed_bytes == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_layers": 0},
        {"head_dim": 0},
        {"bits": 0},
        {"bits": 9},
        {"bits": 2.5},
        {"rotation_seed": -1},
        {"n_heads": 0},
    ],
)
def test_a_wrong_construction_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        TurboQuantKVCache(**{"n_layers": 1, "head_dim": 8, **wrong})  # type: ignore[arg-type]
