"""VeloxQuant's interface: shapes, the ring, bytes, configuration, and what is refused."""

from __future__ import annotations

import copy
from math import ceil
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from tests.dense_attention import to_float64
from tests.seeds.attention import attention, normals, relative_error
from tqstore.errors import InvalidInput
from tqstore.seeds import VeloxConfig, VeloxTurboQuantKVCache
from tqstore.seeds.token_streams import BLOCK_TOKENS

DIM = 64


def cache_of(num_tokens: int = 0, *, seed: int = 0, **config: object) -> VeloxTurboQuantKVCache:
    cache = VeloxTurboQuantKVCache(VeloxConfig(**{"head_dim": DIM, **config}))  # type: ignore
    if num_tokens:
        dim = cache.config.head_dim
        cache.append(normals(num_tokens, dim, seed=seed), normals(num_tokens, dim, seed=seed + 1))
    return cache


@pytest.mark.parametrize("method", ["turboquant_prod", "turboquant_mse"])
@pytest.mark.parametrize("num_tokens", [1, 5, BLOCK_TOKENS, BLOCK_TOKENS + 3])
def test_attend_is_exact_attention_over_what_is_stored(method: str, num_tokens: int) -> None:
    cache = cache_of(num_tokens, method=method, bit_width_inlier=3)
    queries = normals(4, DIM, seed=9, dtype=mx.float32)
    expected = attention(queries, cache.get_keys(), cache.get_values())
    assert relative_error(cache.attend(queries), expected) < 2e-3  # float16 output


@pytest.mark.parametrize(
    ("method", "bits", "bound"),
    [("mse", 2, 0.4), ("mse", 4, 0.12), ("mse", 8, 0.02), ("prod", 3, 0.3), ("prod", 5, 0.08)],
)
def test_attend_is_close_to_exact_attention(method: str, bits: int, bound: float) -> None:
    cache = cache_of(method=method, bit_width_inlier=bits, head_dim=128)
    keys, values, queries = (normals(n, 128, seed=n) for n in (300, 301, 20))
    cache.append(keys, values[:300])
    assert relative_error(cache.attend(queries), attention(queries, keys, values[:300])) < bound


@pytest.mark.parametrize("method", ["prod", "mse"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_error_falls_with_every_bit(method: str, bits: int) -> None:
    errors = []
    for width in (bits, bits + 1) if bits < 8 else (7, 8):
        cache = cache_of(400, method=method, bit_width_inlier=width, head_dim=128)
        keys = normals(400, 128, seed=0)
        errors.append(relative_error(cache.get_keys(), to_float64(keys)))
    assert errors[1] < 0.75 * errors[0]


def test_one_query_and_many() -> None:
    cache = cache_of(50)
    queries = normals(3, DIM, seed=5)
    together = cache.attend(queries)
    assert together.shape == (3, DIM)
    for row, query in zip(together, queries, strict=True):
        alone = cache.attend(query)
        assert alone.shape == (DIM,)
        np.testing.assert_allclose(to_float64(alone), to_float64(row), atol=2e-3)


def test_an_empty_cache_attends_to_zeros() -> None:
    cache = cache_of()
    assert len(cache) == 0
    assert cache.memory_bytes() == 0
    assert cache.attend(normals(DIM)).tolist() == [0.0] * DIM
    assert cache.get_keys().shape == (0, DIM)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_output_has_the_values_dtype(dtype: mx.Dtype) -> None:
    cache = cache_of()
    cache.append(normals(4, DIM), normals(4, DIM, seed=1, dtype=dtype))
    assert cache.attend(normals(DIM, dtype=mx.float32)).dtype == dtype
    cache.reset()
    cache.append(normals(4, DIM), normals(4, DIM, dtype=mx.float32))
    assert cache.attend(normals(DIM)).dtype == mx.float32


@pytest.mark.parametrize(
    ("capacity", "num_tokens", "step"),
    [(8, 7, 3), (8, 8, 3), (8, 9, 3), (8, 23, 3), (8, 60, 60), (300, 301, 7), (300, 700, 110)],
)
def test_a_full_ring_holds_the_newest(capacity: int, num_tokens: int, step: int) -> None:
    keys, values = normals(num_tokens, DIM, seed=3), normals(num_tokens, DIM, seed=4)
    ring, tail = cache_of(capacity=capacity), cache_of()
    for start in range(0, num_tokens, step):
        ring.append(keys[start : start + step], values[start : start + step])
    tail.append(keys[-capacity:], values[-capacity:])
    assert len(ring) == min(num_tokens, capacity)
    assert mx.array_equal(ring.get_keys(), tail.get_keys()).item()
    assert mx.array_equal(ring.get_values(), tail.get_values()).item()
    query = normals(DIM, seed=6)
    difference = mx.abs(ring.attend(query) - tail.attend(query)).max().item()
    assert difference < 2e-3  # the same tokens in another order of slots
    assert ring.memory_bytes() == tail.memory_bytes()


@pytest.mark.parametrize("method", ["prod", "mse"])
def test_appends_in_pieces_are_one_append(method: str) -> None:
    keys, values = normals(300, DIM, seed=1), normals(300, DIM, seed=2)
    whole, pieces = (cache_of(method=method, bit_width_inlier=3) for _ in range(2))
    whole.append(keys, values)
    for start, stop in ((0, 1), (1, 2), (2, 250), (250, 300)):
        pieces.append(keys[start:stop], values[start:stop])
    assert mx.array_equal(whole.get_keys(), pieces.get_keys()).item()
    query = normals(DIM, seed=7)
    assert mx.array_equal(whole.attend(query), pieces.attend(query)).item()


@pytest.mark.parametrize("dim", [64, 100, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_memory_is_the_papers_model(dim: int, bits: int) -> None:
    scale, value = 3, dim + 3
    mse = cache_of(10, head_dim=dim, method="mse", bit_width_inlier=bits)
    assert mse.memory_bytes() == 10 * (ceil(dim * bits / 8) + scale + value)
    prod = cache_of(10, head_dim=dim, method="prod", bit_width_inlier=bits)
    codes, signs, residual_norm = ceil(dim * (bits - 1) / 8), ceil(dim / 8), 2
    assert prod.memory_bytes() == 10 * (codes + signs + residual_norm + scale + value)
    sketched = cache_of(10, head_dim=dim, method="prod", bit_width_inlier=bits, jl_dim=40)
    assert sketched.memory_bytes() == 10 * (codes + 5 + residual_norm + scale + value)


def test_memory_is_what_is_held() -> None:
    cache = cache_of(1000)
    buffers = [*cache._keys._buffers.values(), *cache._values._buffers.values()]
    assert cache.allocated_bytes == sum(buffer.nbytes for buffer in buffers)
    assert cache.memory_bytes() == sum(buffer[:1000].nbytes for buffer in buffers)
    for _ in range(40):
        cache.append(normals(100, DIM), normals(100, DIM))
        tokens, slots = len(cache), cache.allocated_bytes * len(cache) // cache.memory_bytes()
        assert tokens <= slots <= tokens * 5 / 4 + BLOCK_TOKENS


def test_options_that_choose_an_implementation_change_nothing() -> None:
    outputs = []
    for vectorized, fused in ((True, False), (False, True)):
        cache = cache_of(30, enable_vectorized_attend=vectorized, enable_fused_query_dot=fused)
        outputs.append(cache.attend(normals(DIM, seed=5)))
    assert mx.array_equal(*outputs).item()


def test_the_seed_fixes_what_is_stored() -> None:
    same, again, other = (cache_of(20, bit_width_inlier=1, seed=0) for _ in range(3))
    assert mx.array_equal(same.get_keys(), again.get_keys()).item()
    other = VeloxTurboQuantKVCache(VeloxConfig(head_dim=DIM, bit_width_inlier=1, seed=7))
    other.append(normals(20, DIM, seed=0), normals(20, DIM, seed=1))
    assert not mx.array_equal(same.get_keys(), other.get_keys()).item()


def test_a_deep_copy_goes_its_own_way() -> None:
    cache = cache_of(20, method="prod", enable_outlier_two_stream=True, n_outlier_channels=3,
                     n_calib_tokens=10)  # fmt: skip
    copied = copy.deepcopy(cache)
    query = normals(DIM, seed=8)
    before = cache.attend(query)
    copied.append(normals(5, DIM, seed=10), normals(5, DIM, seed=11))
    assert (len(cache), len(copied)) == (20, 25)
    assert mx.array_equal(cache.attend(query), before).item()
    assert not mx.array_equal(copied.attend(query), before).item()


def test_reset_forgets_everything() -> None:
    cache = cache_of(30, enable_outlier_two_stream=True, n_outlier_channels=4, n_calib_tokens=8)
    assert cache.outlier_channels is not None
    cache.reset()
    assert (len(cache), cache.memory_bytes(), cache.allocated_bytes) == (0, 0, 0)
    assert cache.outlier_channels is None
    fresh = cache_of(enable_outlier_two_stream=True, n_outlier_channels=4, n_calib_tokens=8)
    for each in (cache, fresh):
        each.append(normals(9, DIM, seed=2), normals(9, DIM, seed=3))
    assert mx.array_equal(cache.get_keys(), fresh.get_keys()).item()


def test_repr_says_what_it_holds() -> None:
    text = repr(cache_of(12, method="turboquant_mse", bit_width_inlier=3, capacity=40))
    assert text.startswith("VeloxTurboQuantKVCache(d=64, n_tokens=12/40, method=mse, b=3")


def test_any_object_with_the_fields_configures() -> None:
    theirs = SimpleNamespace(head_dim=DIM, method="turboquant_mse", bit_width_inlier=4, dtype=None)
    cache = VeloxTurboQuantKVCache(theirs)
    assert cache.config == VeloxConfig(head_dim=DIM, method="turboquant_mse", bit_width_inlier=4)
    with pytest.raises(InvalidInput, match="head_dim"):
        VeloxTurboQuantKVCache(SimpleNamespace(method="turboquant_mse"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"head_dim": 0},
        {"head_dim": 64.0},
        {"bit_width_inlier": 0},
        {"bit_width_inlier": 9},
        {"bit_width_inlier": [2, 3]},
        {"method": "turboquant_rvq"},
        {"jl_dim": 0},
        {"seed": -1},
        {"capacity": 0},
        {"capacity": True},
        {"n_calib_tokens": 0},
        {"enable_outlier_two_stream": True, "n_outlier_channels": None},
        {"enable_outlier_two_stream": True, "n_outlier_channels": 0},
        {"enable_outlier_two_stream": True, "n_outlier_channels": 128},
    ],
)
def test_a_wrong_configuration_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=list(wrong)[-1]):
        VeloxConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        mx.zeros(DIM + 1),
        mx.zeros((2, 3, DIM)),
        mx.zeros((0, DIM)),
        mx.zeros(()),
        mx.zeros(DIM, dtype=mx.int32),
        np.zeros(DIM, np.float32),
        mx.full((2, DIM), mx.nan),
        mx.full(DIM, mx.inf, dtype=mx.float16),
        mx.full(DIM, 1e17),
    ],
    ids=repr,
)
def test_wrong_vectors_are_refused_and_change_nothing(wrong: mx.array) -> None:
    cache = cache_of(5)
    query = normals(DIM, seed=5)
    before = cache.attend(query)
    for call in (cache.append_key, cache.append_value, cache.attend):
        with pytest.raises(InvalidInput):
            call(wrong)
    with pytest.raises(InvalidInput):
        cache.append(normals(DIM), wrong)
    assert mx.array_equal(cache.attend(query), before).item()
    assert (cache._keys.num_appended, cache._values.num_appended) == (5, 5)


def test_a_token_of_one_side_only_is_not_attended_to() -> None:
    cache = cache_of(5)
    cache.append_key(normals(DIM))
    with pytest.raises(InvalidInput, match="6 keys and 5 values"):
        cache.attend(normals(DIM))
    cache.append_value(normals(DIM))
    assert mx.isfinite(cache.attend(normals(DIM))).all().item()
    with pytest.raises(InvalidInput, match="2 keys but 3 values"):
        cache.append(normals(2, DIM), normals(3, DIM))
