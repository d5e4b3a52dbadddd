"""What VeloxQuant-MLX got wrong, one test each: docs/seeds.md has the list."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest

from tests.dense_attention import to_float64
from tests.seeds.attention import attention, normals, relative_error
from tqstore.errors import InvalidInput
from tqstore.seeds import UPPER_MSE_FACTOR, VeloxConfig, VeloxTurboQuantKVCache

DIM = 128


def cache_of(**config: object) -> VeloxTurboQuantKVCache:
    return VeloxTurboQuantKVCache(VeloxConfig(**{"head_dim": DIM, **config}))  # type: ignore


@pytest.mark.parametrize("method", ["prod", "mse"])
@pytest.mark.parametrize("norm", [1e-30, 1e-3, 0.1, 1.0, 10.0, 1e4, 1e12])
def test_key_norms_are_stored(method: str, norm: float) -> None:
    keys = normals(200, DIM, dtype=mx.float32)
    cache = cache_of(method=method, bit_width_inlier=4)
    cache.append_key(keys * norm)
    unit = cache_of(method=method, bit_width_inlier=4)
    unit.append_key(keys)
    scaled, plain = (
        relative_error(held.get_keys(), to_float64(keys * factor))
        for held, factor in ((cache, norm), (unit, 1.0))
    )
    assert scaled == pytest.approx(plain, rel=2e-3)
    assert plain < 0.2


def test_keys_of_different_norms_share_a_cache() -> None:
    norms = mx.exp(mx.random.normal((200, 1), key=mx.random.key(3)) * 2)
    keys = normals(200, DIM, dtype=mx.float32) * norms
    cache = cache_of(method="mse", bit_width_inlier=4)
    cache.append_key(keys)
    for row, key in zip(cache.get_keys(), keys, strict=True):
        assert relative_error(row, to_float64(key)) < 0.2


@pytest.mark.parametrize("method", ["prod", "mse"])
def test_large_scores_do_not_overflow(method: str) -> None:
    # In float16 these scores are inf, and attention NaN.
    keys, values = normals(40, DIM) * 2000, normals(40, DIM, seed=1)
    cache = cache_of(method=method, bit_width_inlier=4)
    cache.append(keys, values)
    query = keys[7]
    assert mx.abs(keys.astype(mx.float32) @ query.astype(mx.float32)).max().item() > 1e8
    assert relative_error(cache.attend(query[None]), to_float64(values[7])[None]) < 0.01


@pytest.mark.parametrize("largest", [1e16, -7e16])
def test_the_largest_magnitudes_stay_finite(largest: float) -> None:
    cache = cache_of(method="prod", bit_width_inlier=3)
    cache.append(mx.full((3, DIM), largest), mx.full((3, DIM), largest))
    assert mx.isfinite(cache.attend(mx.full(DIM, abs(largest)))).all().item()


def test_bfloat16_keys_are_taken() -> None:
    keys, values, queries = (normals(60, DIM, seed=i, dtype=mx.bfloat16) for i in range(3))
    cache = cache_of(method="prod", bit_width_inlier=5)
    for key, value in zip(keys, values, strict=True):
        cache.append_key(key)
        cache.append_value(value)
    assert relative_error(cache.attend(queries), attention(queries, keys, values)) < 0.15


def test_n_rows_are_n_tokens() -> None:
    cache = cache_of()
    cache.append_key(normals(4, DIM))
    cache.append_value(normals(4, DIM, seed=1))
    assert len(cache) == 4
    assert cache.get_keys().shape == (4, DIM)


@pytest.mark.parametrize("bits", [3, 4])
def test_the_sketch_has_as_many_rows_as_the_head_has_channels(bits: int) -> None:
    whole = cache_of(method="prod", bit_width_inlier=bits)
    clipped = cache_of(method="prod", bit_width_inlier=bits, jl_dim=64)
    keys = normals(500, DIM)
    for cache in (whole, clipped):
        cache.append_key(keys)
    assert whole.memory_bytes() - clipped.memory_bytes() == 500 * 8
    errors = [relative_error(cache.get_keys(), to_float64(keys)) for cache in (whole, clipped)]
    assert errors[0] < 0.85 * errors[1]


def test_one_bit_is_not_two() -> None:
    keys = normals(300, DIM)
    one, two = (cache_of(method="prod", bit_width_inlier=bits) for bits in (1, 2))
    for cache in (one, two):
        cache.append_key(keys)
    assert two.memory_bytes() - one.memory_bytes() == 300 * DIM // 8
    assert relative_error(two.get_keys(), to_float64(keys)) < 0.75 * relative_error(
        one.get_keys(), to_float64(keys)
    )


def outlier_keys(num_tokens: int) -> mx.array:
    """Four channels of 30 times the others' size, which differ from token to token."""
    gains = np.ones(DIM, np.float32)
    gains[[3, 40, 41, 100]] = 30.0
    return normals(num_tokens, DIM, dtype=mx.float32) * mx.array(gains)


@pytest.mark.parametrize("method", ["prod", "mse"])
@pytest.mark.parametrize("num_tokens", [1, 20, 199, 200, 201, 400])
def test_the_first_tokens_are_protected(method: str, num_tokens: int) -> None:
    keys = outlier_keys(num_tokens)
    cache = cache_of(
        method=method, bit_width_inlier=3, enable_outlier_two_stream=True, n_outlier_channels=4
    )
    for start in range(0, num_tokens, 50):
        cache.append_key(keys[start : start + 50])
    errors = mx.abs(cache.get_keys() - keys)[:, [0, 1, 50, 127]]
    unprotected = cache_of(method=method, bit_width_inlier=3)
    unprotected.append_key(keys)
    before = mx.abs(unprotected.get_keys() - keys)[:, [0, 1, 50, 127]]
    assert errors.mean().item() < 0.3 * before.mean().item()
    # Not in the mean only: the worst of the first tokens is as good as the others.
    assert errors[:200].max().item() < 1.5


def test_channels_are_chosen_from_the_first_tokens_whatever_the_split() -> None:
    keys, values = outlier_keys(60), normals(60, DIM)
    caches = []
    for step in (60, 1, 7, 24):
        cache = cache_of(
            bit_width_inlier=3, enable_outlier_two_stream=True, n_outlier_channels=4,
            n_calib_tokens=24,
        )  # fmt: skip
        for start in range(0, 60, step):
            cache.append(keys[start : start + step], values[start : start + step])
        assert cache.outlier_channels == (3, 40, 41, 100)
        caches.append(cache)
    for cache in caches[1:]:
        assert mx.array_equal(cache.get_keys(), caches[0].get_keys()).item()
        assert cache.memory_bytes() == caches[0].memory_bytes()


def test_outliers_are_counted_in_memory_and_leave_the_rest() -> None:
    cache = cache_of(
        method="mse", bit_width_inlier=4, enable_outlier_two_stream=True, n_outlier_channels=16,
        n_calib_tokens=10,
    )  # fmt: skip
    cache.append(outlier_keys(9), normals(9, DIM))
    assert cache.memory_bytes() == 9 * (4 * DIM + DIM + 3)  # held exact until the choice
    cache.append(outlier_keys(1), normals(1, DIM))
    key = (DIM - 16) * 4 // 8 + 3 + 16 + 3
    assert cache.memory_bytes() == 10 * (key + DIM + 3) + 2 * 16


def test_a_ring_smaller_than_the_calibration_chooses_when_it_is_full() -> None:
    cache = cache_of(
        bit_width_inlier=3, enable_outlier_two_stream=True, n_outlier_channels=4, capacity=16
    )
    keys, values = outlier_keys(50), normals(50, DIM)
    cache.append(keys, values)
    assert cache.outlier_channels == (3, 40, 41, 100)
    assert len(cache) == 16
    assert relative_error(cache.get_keys(), to_float64(keys[-16:])) < 0.05


def test_attention_with_outliers_is_far_better_than_without() -> None:
    keys, values = outlier_keys(400), normals(400, DIM, seed=1)
    queries = normals(20, DIM, seed=2, dtype=mx.float32) / 20
    exact = attention(queries, keys, values)
    errors = []
    for options in ({}, {"enable_outlier_two_stream": True, "n_outlier_channels": 4}):
        cache = cache_of(method="mse", bit_width_inlier=3, **options)
        cache.append(keys, values)
        errors.append(relative_error(cache.attend(queries), exact))
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("capacity", [None, 3])
def test_a_value_belongs_to_its_key_whatever_the_order_of_calls(capacity: int | None) -> None:
    keys, values = normals(8, DIM), normals(8, DIM, seed=1)
    orders = []
    for order in ("kv", "vk", "all keys first", "all values first"):
        cache = cache_of(bit_width_inlier=4, capacity=capacity)
        if order in ("kv", "vk"):
            for key, value in zip(keys, values, strict=True):
                calls = [(cache.append_key, key), (cache.append_value, value)]
                for call, vector in calls if order == "kv" else reversed(calls):
                    call(vector)
        else:
            sides = [(cache.append_key, keys), (cache.append_value, values)]
            for call, side in sides if order == "all keys first" else reversed(sides):
                for vector in side:
                    call(vector)
        orders.append(cache.attend(normals(DIM, seed=2)))
    for output in orders[1:]:
        assert mx.array_equal(output, orders[0]).item()


def test_no_capacity_is_no_memory_taken_ahead() -> None:
    cache = cache_of(capacity=None)
    assert cache.allocated_bytes == 0
    cache.append(normals(1, DIM), normals(1, DIM))
    assert cache.allocated_bytes < 64 << 10
    assert copy.deepcopy(cache).allocated_bytes == cache.allocated_bytes


@pytest.mark.parametrize("dim", [1, 2, 8, 33, 80, 96, 100, 112, 192, 256, 576])
@pytest.mark.parametrize(("method", "bits"), [("mse", 3), ("prod", 4), ("prod", 3)])
def test_any_head_dim_packs(dim: int, method: str, bits: int) -> None:
    cache = cache_of(head_dim=dim, method=method, bit_width_inlier=bits)
    keys, values = normals(20, dim), normals(20, dim, seed=1)
    cache.append(keys, values)
    queries = normals(5, dim, seed=2)
    assert relative_error(cache.attend(queries), attention(queries, keys, values)) < 0.5
    assert relative_error(cache.get_values(), to_float64(values)) < 0.01


@pytest.mark.parametrize("magnitude", [1e-7, 1e-5, 6e-8, 1e-30])
def test_small_values_keep_their_scale(magnitude: float) -> None:
    values = normals(20, DIM, dtype=mx.float32) * magnitude
    cache = cache_of(bit_width_inlier=4)
    cache.append(normals(20, DIM), values)
    assert relative_error(cache.get_values() / magnitude, to_float64(values / magnitude)) < 0.01
    assert mx.abs(cache.attend(normals(DIM)) / magnitude).max().item() > 0.01


def test_codes_are_taken_against_the_rounded_scale() -> None:
    # Half a step of the stored scale bounds the error of every coordinate, save the few codes that
    # are clipped because their scale was rounded down: those are within 2^-11 of 127 steps more.
    values = normals(500, DIM, dtype=mx.float32)
    cache = cache_of()
    cache.append_value(values)
    streams = cache._values.streams()
    step = streams["scales"].reshape(-1)[:500, None]
    steps = mx.abs(cache.get_values() - values) / step
    inside = mx.abs(values) < 126.5 * step
    assert mx.where(inside, steps, 0).max().item() <= 0.5 + 1e-4
    assert steps.max().item() <= 0.5 + 127 * 2**-11


@pytest.mark.parametrize("wrong", [mx.inf, -mx.inf, mx.nan])
def test_what_is_not_finite_is_refused(wrong: float) -> None:
    keys, values = normals(6, DIM), normals(6, DIM, seed=1)
    cache = cache_of(bit_width_inlier=3)
    cache.append(keys, values)
    bad = normals(DIM, seed=2)
    bad[17] = wrong
    for call in (cache.append_key, cache.append_value):
        with pytest.raises(InvalidInput, match="inf, NaN"):
            call(bad)
    assert mx.isfinite(cache.attend(normals(DIM, seed=3))).all().item()


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_papers_bound_holds_with_its_true_factor(bits: int) -> None:
    assert pytest.approx(2.7207, abs=1e-4) == UPPER_MSE_FACTOR
    keys = normals(3000, DIM, dtype=mx.float32)
    keys = keys / mx.linalg.norm(keys, axis=1, keepdims=True)
    cache = cache_of(method="mse", bit_width_inlier=bits)
    cache.append_key(keys)
    error = mx.square(cache.get_keys() - keys).sum(1).mean().item()
    assert 4.0**-bits <= error <= UPPER_MSE_FACTOR * 4.0**-bits
