"""Attention over pages and tail against dense float64 attention over the decoded sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tqstore.attend
from tests.dense_attention import dense_attention, to_float64, visible
from tqstore.attend import View
from tqstore.kv_cache import KVCache
from tqstore.spec import CacheSpec, LayerSpec

CODECS = [
    ("exact", "exact"),
    ("prod4", "int8"),
    ("prod4+gauss", "int8"),
    ("prod1", "mse2"),
    ("mse3", "uni3"),
    ("uni4", "mse4"),
    ("int8", "prod3"),
    ("mse4+mean+out16", "mse4+mean"),
    ("prod4+out5", "uni4+mean+out3"),
    ("split3.5", "split2.5+mean"),
]


def random(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def filled(tokens: int, **changes: object) -> KVCache:
    fields: dict[str, object] = {"kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    cache = KVCache(CacheSpec([LayerSpec(**(fields | changes))], page_tokens=16, recent_tokens=8))
    layer = cache.spec.layers[0]
    dtype = getattr(mx, layer.dtype)
    keys = random(layer.kv_heads, tokens, layer.head_dim, dtype=dtype)
    values = random(layer.kv_heads, tokens, layer.value_dim or layer.head_dim, dtype=dtype)
    cache.append(0, keys, values)
    return cache


def error_of(cache: KVCache, queries: mx.array, scale: float | None = None) -> float:
    expected = dense_attention(
        to_float64(queries),
        to_float64(cache.get_keys(0)),
        to_float64(cache.get_values(0)),
        scale=scale,
    )
    return float(np.abs(to_float64(cache.attend(0, queries, scale)) - expected).max())


@pytest.mark.parametrize(("keys", "values"), CODECS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_equals_dense_attention_over_the_decoded_sequence(
    keys: str, values: str, head_dim: int
) -> None:
    mx.random.seed(1)
    cache = filled(101, head_dim=head_dim, keys=keys, values=values)
    assert error_of(cache, random(2, 1, head_dim)) < 1e-5
    assert error_of(cache, random(8, 30, head_dim)) < 1e-5


def test_value_dim_may_differ_and_scale_may_be_given() -> None:
    mx.random.seed(2)
    cache = filled(70, head_dim=64, value_dim=32, keys="uni4", values="mse4")
    assert cache.attend(0, random(4, 3, 64)).shape == (4, 3, 32)
    assert error_of(cache, random(4, 3, 64), scale=0.5) < 1e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_output_has_the_queries_dtype_whatever_the_cache_holds(dtype: str) -> None:
    mx.random.seed(3)
    cache = filled(60, dtype=dtype)
    queries = random(4, 2, 64, dtype=mx.bfloat16)
    out = cache.attend(0, queries)
    assert out.dtype == mx.bfloat16
    expected = dense_attention(
        to_float64(queries), to_float64(cache.get_keys(0)), to_float64(cache.get_values(0))
    )
    # get_keys rounds decoded values to the cache's dtype and the output is bfloat16 itself.
    assert np.abs(to_float64(out) - expected).max() < 0.02


@pytest.mark.parametrize("window", [1, 5, 16, 24, 33, 1000])
@pytest.mark.parametrize("sink_tokens", [0, 3, 20])
@pytest.mark.parametrize("num_queries", [1, 7, 40])
def test_windows_and_sinks(window: int, sink_tokens: int, num_queries: int) -> None:
    mx.random.seed(4)
    layer = {"window": window, "sink_tokens": sink_tokens, "keys": "exact", "values": "exact"}
    keys, values = random(2, 150, 64), random(2, 150, 64)
    cache = filled(1, **layer)
    cache.trim(1)
    cache.append(0, keys[:, : 150 - num_queries], values[:, : 150 - num_queries])
    cache.append(0, keys[:, 150 - num_queries :], values[:, 150 - num_queries :])
    queries = random(4, num_queries, 64)
    expected = dense_attention(
        to_float64(queries),
        to_float64(keys),
        to_float64(values),
        window=window,
        sink_tokens=sink_tokens,
    )
    assert np.abs(to_float64(cache.attend(0, queries)) - expected).max() < 1e-5


@pytest.mark.parametrize("window", [None, 1, 9])
def test_view_masks_exactly_what_the_rule_says(window: int | None) -> None:
    for num_tokens, num_queries, sinks in ((30, 1, 0), (30, 30, 4), (7, 3, 7)):
        view = View(num_tokens, num_queries, window, sinks)
        expected = visible(num_queries, num_tokens, window, sinks)
        assert np.array_equal(np.array(view.mask(np.arange(num_tokens))), expected)
        for first in range(num_tokens):
            for last in range(first + 1, num_tokens + 1):
                if view.sees_all(first, last):
                    assert expected[:, first:last].all()


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_result_does_not_depend_on_the_length_of_parts_and_runs(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(5)
    cache = filled(300)
    queries = random(4, 9, 64) * 30  # peaked weights: every run changes the maximum
    whole = to_float64(cache.attend(0, queries))
    per_query = 4 * 4 * (16 + 64)
    for name in ("CPU_TRANSIENT_NBYTES", "GPU_TRANSIENT_NBYTES"):
        monkeypatch.setattr(tqstore.attend, name, pages * 9 * per_query)
    monkeypatch.setattr(tqstore.attend, "_PAGES_FOR_QUERIES", pages)
    monkeypatch.setattr(tqstore.attend, "RUN_NBYTES", 1)
    assert np.abs(to_float64(cache.attend(0, queries)) - whole).max() < 1e-5


@pytest.mark.parametrize("window", [None, 1, 25, 70])
@pytest.mark.parametrize("queries_at_once", [1, 7, 16])
def test_many_queries_are_attended_to_some_at_a_time(
    window: int | None, queries_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(10)
    cache = filled(200, window=window, sink_tokens=3, keys="exact", values="exact")
    queries = random(4, 60, 64)
    whole = to_float64(cache.attend(0, queries))
    monkeypatch.setattr("tqstore.layer_cache.max_queries", lambda *_: queries_at_once)
    assert np.abs(to_float64(cache.attend(0, queries)) - whole).max() < 1e-5


def test_memory_of_many_queries_is_bounded() -> None:
    mx.random.seed(11)
    cache = filled(3000, kv_heads=8, head_dim=128)
    queries = random(32, 1000, 128)
    mx.eval(queries)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    out = cache.attend(0, queries)
    mx.eval(out)
    assert mx.get_peak_memory() - before - 2 * out.nbytes < 300e6  # scores alone: 400 MB


@pytest.mark.parametrize("transform", [mx.grad, mx.compile], ids=["grad", "compile"])
def test_inside_a_transformation_of_functions(transform: Callable[..., Any]) -> None:
    cache = filled(300)
    queries = random(4, 3, 64)
    inside = transform(lambda rows: cache.attend(0, rows).sum())(queries)
    if transform is mx.compile:
        assert mx.allclose(inside, cache.attend(0, queries).sum(), rtol=1e-4)
        return
    step = 1e-2 * random(4, 3, 64)
    change = float((cache.attend(0, queries + step) - cache.attend(0, queries - step)).sum()) / 2
    assert abs(float((inside * step).sum()) - change) < 1e-3


def test_a_real_score_is_never_below_a_masked_one() -> None:
    layer = {"kv_heads": 1, "dtype": "bfloat16", "window": 2, "keys": "exact", "values": "exact"}
    cache = filled(1, **layer)
    cache.trim(1)
    keys = -mx.abs(random(1, 50, 64, dtype=mx.bfloat16)) * 1e15
    values = mx.concatenate([mx.full((1, 48, 64), 1000.0), mx.ones((1, 2, 64))], axis=1)
    cache.append(0, keys, values.astype(mx.bfloat16))
    assert mx.array_equal(cache.attend(0, mx.abs(random(1, 1, 64)) * 1e16), mx.ones((1, 1, 64)))


@pytest.mark.parametrize("size", [1 << 31, 1 << 63])
def test_windows_beyond_any_counter(size: int) -> None:
    mx.random.seed(12)
    huge = filled(60, window=size, sink_tokens=size)
    queries = random(4, 3, 64)
    assert error_of(huge, queries) < 1e-5


@pytest.mark.parametrize("num_queries", [1, 5])
def test_sink_logits_take_a_share_of_the_weight(num_queries: int) -> None:
    mx.random.seed(8)
    cache = filled(90)
    queries, logits = random(4, num_queries, 64), random(4) * 3
    without = to_float64(cache.attend(0, queries))
    keys = to_float64(cache.get_keys(0))
    for head in range(4):
        for query in range(num_queries):
            seen = keys[head // 2, : 90 - num_queries + query + 1]
            scores = seen @ to_float64(queries)[head, query] / 8
            share = np.exp(scores).sum() / (np.exp(scores).sum() + np.exp(float(logits[head])))
            out = to_float64(cache.attend(0, queries, sink_logits=logits))[head, query]
            assert np.abs(out - share * without[head, query]).max() < 1e-5


def test_scores_far_beyond_float16_stay_finite() -> None:
    mx.random.seed(6)
    cache = filled(1)
    cache.trim(1)
    keys = random(2, 100, 64) * 3e4
    cache.append(0, keys, random(2, 100, 64))
    queries = random(2, 3, 64) * 3e4
    out = to_float64(cache.attend(0, queries))
    assert np.isfinite(out).all()
    expected = dense_attention(
        to_float64(queries), to_float64(cache.get_keys(0)), to_float64(cache.get_values(0))
    )
    assert np.abs(out - expected).max() < 1e-3
