"""The cache of one sequence: append, seal, trim, fork, errors."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from tests.dense_attention import to_float64
from tqstore.errors import InvalidInput, NotFound
from tqstore.kv_cache import KVCache
from tqstore.spec import CacheSpec, LayerSpec

TOKENS = 200
CODECS = [
    ("prod4", "int8"),
    ("exact", "exact"),
    ("uni3", "mse5"),
    ("mse4+mean+out16", "mse4+mean"),
    ("split2.5", "int8+out3"),
    ("balanced", "balanced"),
]


def spec_of(**changes: object) -> CacheSpec:
    fields: dict[str, object] = {"kv_heads": 2, "head_dim": 64}
    layer = LayerSpec(**(fields | changes))
    return CacheSpec([layer, layer], page_tokens=16, recent_tokens=8, seed=3)


def key_values(tokens: int = TOKENS, seed: int = 0, dtype: mx.Dtype = mx.float16) -> list[mx.array]:
    mx.random.seed(seed)
    return [mx.random.normal((2, tokens, 64)).astype(dtype) for _ in range(2)]


def fill(cache: KVCache, keys: mx.array, values: mx.array, step: int | None = None) -> KVCache:
    step = step or keys.shape[1]
    for first in range(0, keys.shape[1], step):
        for layer in range(len(cache.layers)):
            cache.append(layer, keys[:, first : first + step], values[:, first : first + step])
    return cache


def records(cache: KVCache, layer: int = 0) -> np.ndarray:
    """Every sealed page's bytes, in block order."""
    arena = cache.pager.pool.arenas[layer]
    slots = arena.resolve(cache.layers[layer].table.refs())
    return np.concatenate([np.array(view) for view in arena.views(slots)])


@pytest.mark.parametrize("step", [1, 3, 16, 24, 57, 199])
@pytest.mark.parametrize("codecs", CODECS)
def test_any_split_of_appends_gives_the_same_pages_and_tail(
    step: int, codecs: tuple[str, str]
) -> None:
    spec = spec_of(keys=codecs[0], values=codecs[1])
    at_once = fill(KVCache(spec), *key_values())
    in_steps = fill(KVCache(spec), *key_values(), step=step)
    assert np.array_equal(records(at_once), records(in_steps))
    assert mx.array_equal(at_once.layers[0].tail.keys, in_steps.layers[0].tail.keys)
    assert at_once.num_sealed_blocks == in_steps.num_sealed_blocks == (TOKENS - 8) // 16
    in_steps.check()


def test_the_newest_tokens_are_exact() -> None:
    keys, values = key_values()
    cache = fill(KVCache(spec_of()), keys, values, step=10)
    assert mx.array_equal(cache.get_keys(0)[:, -8:], keys[:, -8:])
    assert mx.array_equal(cache.get_values(1)[:, -8:], values[:, -8:])
    assert cache.get_keys(0).shape == keys.shape
    assert cache.get_keys(0).dtype == mx.float16


def test_append_and_fetch_gives_the_new_tokens_exactly_and_all_before() -> None:
    keys, values = key_values()
    cache, plain = KVCache(spec_of()), KVCache(spec_of())
    for first in range(0, TOKENS, 40):
        part = slice(first, first + 40)
        seen_keys, seen_values = cache.append_and_fetch(0, keys[:, part], values[:, part])
        before = plain.get_keys(0) if first else keys[:, :0]
        plain.append(0, keys[:, part], values[:, part])
        assert mx.array_equal(seen_keys, mx.concatenate([before, keys[:, part]], axis=1))
        assert seen_values.shape == (2, first + 40, 64)
    assert np.array_equal(records(cache), records(plain))


@pytest.mark.parametrize(("window", "sinks"), [(20, 0), (20, 5), (3, 0), (50, 30)])
@pytest.mark.parametrize("step", [1, 11, 64])
def test_append_and_fetch_of_a_window(window: int, sinks: int, step: int) -> None:
    keys, values = key_values(128)
    spec = spec_of(keys="exact", values="exact", window=window, sink_tokens=sinks)
    cache = KVCache(spec)
    for first in range(0, 128, step):
        part = slice(first, min(128, first + step))
        seen_keys, _ = cache.append_and_fetch(0, keys[:, part], values[:, part])
        start = max(0, first - window + 1)
        expected = keys[:, start : part.stop]
        if start and sinks:
            expected = mx.concatenate([keys[:, : min(sinks, start)], expected], axis=1)
        assert mx.array_equal(seen_keys, expected)
        cache.check()


def test_pages_out_of_the_window_are_dropped() -> None:
    spec = spec_of(window=40, sink_tokens=17)
    cache = fill(KVCache(spec), *key_values(1000), step=10)
    arena = cache.pager.pool.arenas[0]
    # Two blocks of sinks, and as many as window, recent tokens and one append can touch.
    assert arena.num_used <= 2 + (40 + 8 + 10) // 16 + 2
    assert arena.nbytes <= 16 * arena.spec.page_nbytes
    with pytest.raises(NotFound, match="left the window"):
        cache.get_keys(0)


@pytest.mark.parametrize("taken", [0, 1, 7, 8, 20, 40, 150, 200])
def test_trim_keeps_the_tokens_before_it(taken: int) -> None:
    cache = fill(KVCache(spec_of(keys="exact", values="exact")), *key_values())
    assert cache.can_trim(taken)
    assert cache.trim(taken) == taken
    assert cache.num_tokens == TOKENS - taken
    assert mx.array_equal(cache.get_keys(1), key_values()[0][:, : TOKENS - taken])
    cache.check()
    more = key_values(60, seed=9)
    fill(cache, *more)
    expected = mx.concatenate([key_values()[1][:, : TOKENS - taken], more[1]], axis=1)
    assert mx.array_equal(cache.get_values(0), expected)
    cache.check()


def test_a_trim_into_a_page_reopens_it_as_decoded_and_says_so() -> None:
    cache = fill(KVCache(spec_of()), *key_values())
    decoded = cache.get_keys(0)
    cache.trim(50)
    assert cache.stats.paging["reopened_pages"] == 2  # one a layer
    assert mx.array_equal(cache.get_keys(0), decoded[:, :150])


def test_a_windowed_layer_refuses_to_go_back_beyond_what_it_kept_and_is_unchanged() -> None:
    cache = fill(KVCache(spec_of(window=32)), *key_values(), step=8)
    assert cache.can_trim(8)
    assert not cache.can_trim(120)
    before = cache.layers[0].table.refs()
    with pytest.raises(NotFound, match="window of 32"):
        cache.trim(120)
    assert cache.num_tokens == TOKENS
    assert np.array_equal(cache.layers[0].table.refs(), before)


def test_forks_share_pages_and_go_their_own_ways() -> None:
    cache = fill(KVCache(spec_of()), *key_values())
    used = cache.pager.pool.used_nbytes
    forks = [cache.fork() for _ in range(50)]
    assert cache.pager.pool.used_nbytes == used
    first, second = forks[:2]
    fill(first, *key_values(30, seed=1))
    second.trim(120)
    fill(second, *key_values(50, seed=2))
    assert np.array_equal(to_float64(cache.get_keys(0)), to_float64(forks[2].get_keys(0)))
    assert mx.array_equal(first.get_keys(0)[:, -8:], key_values(30, seed=1)[0][:, -8:])
    assert first.num_tokens == 230
    assert second.num_tokens == 130
    for one in (cache, first, second):
        one.check()


def test_slots_come_back_when_caches_are_gone() -> None:
    cache = fill(KVCache(spec_of()), *key_values())
    pool = cache.pager.pool
    fork = cache.fork()
    fill(fork, *key_values(100, seed=1))
    used = pool.used_nbytes
    del fork
    gc.collect()
    cache.pager.reap()
    assert pool.used_nbytes < used
    pool.check()
    assert pool.arenas[0].num_used == cache.num_sealed_blocks


def test_stats_count_true_bytes() -> None:
    cache = fill(KVCache(spec_of()), *key_values(1000))
    stats = cache.stats
    page = cache.spec.page_specs[0].page_nbytes
    assert stats.dense_nbytes == 2 * 2 * 2 * 1000 * 64 * 2
    assert stats.hot_nbytes >= 2 * stats.num_blocks * page
    assert stats.hot_nbytes == sum(
        segment.nbytes for arena in cache.pager.pool.arenas for segment in arena.segments.arrays
    )
    assert stats.hot_nbytes - 7 * page <= stats.used_nbytes <= stats.budget_nbytes
    assert stats.used_nbytes < stats.mlx_nbytes <= stats.process_nbytes
    assert cache.nbytes == stats.hot_nbytes + stats.tail_nbytes + stats.table_nbytes


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (mx.zeros((2, 4, 63), mx.float16), mx.zeros((2, 4, 64), mx.float16), r"keys have shape"),
        (mx.zeros((1, 4, 64), mx.float16), mx.zeros((1, 4, 64), mx.float16), r"\[2, n >= 1, 64\]"),
        (mx.zeros((2, 4, 64), mx.float16), mx.zeros((2, 3, 64), mx.float16), "values have shape"),
        (mx.zeros((2, 0, 64), mx.float16), mx.zeros((2, 0, 64), mx.float16), "n >= 1"),
        (mx.zeros((4, 64), mx.float16), mx.zeros((4, 64), mx.float16), "keys have shape"),
        (mx.zeros((2, 4, 64)), mx.zeros((2, 4, 64)), "float32, the cache holds float16"),
        (mx.full((2, 4, 64), float("nan"), mx.float16), mx.zeros((2, 4, 64), mx.float16), "finite"),
        (mx.zeros((2, 4, 64), mx.float16), mx.full((2, 4, 64), float("inf"), mx.float16), "finite"),
    ],
)
def test_bad_arrays_are_refused_and_change_nothing(
    keys: mx.array, values: mx.array, message: str
) -> None:
    cache = fill(KVCache(spec_of()), *key_values(30))
    with pytest.raises(InvalidInput, match=message):
        cache.append(1, keys, values)
    assert [layer.num_tokens for layer in cache.layers] == [30, 30]


def test_arrays_that_are_not_mlx_are_refused_by_name() -> None:
    cache = fill(KVCache(spec_of()), *key_values(30))
    good, other = mx.zeros((2, 4, 64), mx.float16), np.zeros((2, 4, 64), np.float16)
    for keys, values, name in ((other, good, "keys"), (good, other, "values")):
        with pytest.raises(InvalidInput, match=f"{name} must be an mlx array, not numpy.ndarray"):
            cache.append(0, keys, values)
        with pytest.raises(InvalidInput, match=name):
            cache.append_and_fetch(0, keys, values)
    with pytest.raises(InvalidInput, match=r"queries must be an mlx array, not list"):
        cache.attend(0, [[[0.0] * 64]])  # type: ignore[arg-type]
    assert cache.num_tokens == 30


def test_numbers_that_are_not_finite_never_reach_a_page() -> None:
    cache = KVCache(spec_of(), check_finite=False)
    keys, values = key_values(20)
    bad = mx.where(mx.arange(20)[None, :, None] == 5, float("nan"), keys).astype(mx.float16)
    fill(cache, bad, values)
    with pytest.raises(InvalidInput, match="positions 0 to 31 are not finite"):
        fill(cache, keys, values)
    assert cache.layers[0].num_tokens == 20
    assert len(cache.layers[0].table) == 0
    cache.check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.append(2, *key_values(1)), "layer 2 is not one"),
        (lambda c: c.attend(-1, mx.zeros((2, 1, 64))), "layer -1"),
        (lambda c: c.attend(0, mx.zeros((3, 1, 64))), "a multiple of 2"),
        (lambda c: c.attend(0, mx.zeros((2, 1, 32))), "queries have shape"),
        (lambda c: c.attend(0, mx.zeros((2, 31, 64))), "31 queries for 30 tokens"),
        (lambda c: c.attend(0, mx.zeros((2, 0, 64))), "0 queries"),
        (lambda c: c.trim(31), "cannot trim 31 of 30"),
        (lambda c: c.trim(-1), "cannot trim -1"),
        (lambda _: KVCache(spec_of(), memory_budget=0), "memory_budget"),
    ],
)
def test_bad_calls_say_what_is_wrong(call: object, message: str) -> None:
    cache = fill(KVCache(spec_of()), *key_values(30))
    with pytest.raises(InvalidInput, match=message):
        call(cache)  # type: ignore[operator]
    assert cache.num_tokens == 30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec_of(keys="prod9"), "unknown codec 'prod9'"),
        (lambda: spec_of(keys=""), "unknown codec"),
        (lambda: spec_of(values="int8+gauss"), r"option \+gauss"),
        (lambda: spec_of(kv_heads=0), "kv_heads"),
        (lambda: spec_of(head_dim=1 << 20), "head_dim"),
        (lambda: spec_of(dtype="int8"), "dtype"),
        (lambda: spec_of(window=0), "window"),
        (lambda: spec_of(sink_tokens=-1), "sink_tokens"),
        (lambda: CacheSpec([]), "at least one layer"),
        (lambda: CacheSpec([LayerSpec(1, 64)], page_tokens=0), "page_tokens"),
        (lambda: CacheSpec([LayerSpec(1, 64)], recent_tokens=-1), "recent_tokens"),
        (lambda: CacheSpec([LayerSpec(1, 64)], seed=-1), "seed"),
        (lambda: CacheSpec([LayerSpec(1, 80)], rotation="hadamard"), "Hadamard transform"),
        (lambda: CacheSpec([LayerSpec(1, 64)], rotation="none"), "rotation"),
    ],
)
def test_impossible_specs_are_refused_when_made(make: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()  # type: ignore[operator]


def test_hash_seeds_and_layers_share_one_rotation_but_not_pages() -> None:
    one = fill(KVCache(spec_of()), *key_values())
    other = fill(
        KVCache(CacheSpec(one.spec.layers, page_tokens=16, recent_tokens=8, seed=4)), *key_values()
    )
    assert np.array_equal(records(one, 0), records(one, 1))
    assert not np.array_equal(records(one), records(other))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 2.0}, "kv_heads must be an integer from 1 to 4096, not 2.0"),
        ({"kv_heads": True}, "kv_heads"),
        ({"head_dim": 0}, "head_dim must be an integer from 1 to 16384, not 0"),
        ({"value_dim": 0}, "value_dim"),
        ({"window": 2.0}, "window must be an integer of at least 1, not 2.0"),
        ({"window": True}, "window"),
        ({"sink_tokens": 1.5}, "sink_tokens"),
        ({"sink_tokens": None}, "sink_tokens"),
        ({"keys": "prod9"}, r"choosing keys: unknown codec 'prod9'\. Use prod1.*, \+mean for all"),
        ({"values": "best"}, "choosing values: .* or a preset: card, small, balanced, near-loss"),
        ({"keys": "mse4+gauss"}, r"option \+gauss is not .* or a preset: card"),
        ({"values": None}, "unknown codec None"),
        ({"values": "mse4+out64"}, "keeps 64 channels apart, of only 64"),
        ({"dtype": "f2"}, "dtype must be one of float16, bfloat16, float32, not 'f2'$"),
        ({"dtype": mx.float16}, "Give the text 'float16'"),
        ({"dtype": np.float16}, "Give the text 'float16'"),
        ({"dtype": None}, "dtype"),
    ],
)
def test_impossible_layers_are_refused_when_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        LayerSpec(**({"kv_heads": 2, "head_dim": 64} | fields))


@pytest.mark.parametrize(
    ("layers", "fields", "message"),
    [
        (LayerSpec(1, 64), {}, r"layers must be a list of LayerSpec, not LayerSpec\("),
        ([3], {}, r"list of LayerSpec, not \[3\]"),
        (None, {}, "list of LayerSpec, not None"),
        ([LayerSpec(1, 64)], {"window_history": 1}, "window_history must be a bool, not 1"),
        ([LayerSpec(1, 64)], {"recent_tokens": 1.0}, "recent_tokens"),
        ([LayerSpec(1, 64)], {"seed": "1"}, "seed"),
        ([LayerSpec(1, 64)], {"page_tokens": None}, "page_tokens"),
    ],
)
def test_caches_of_something_else_are_refused(
    layers: object, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        CacheSpec(layers, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("check_finite", [True, False])
def test_a_number_that_is_not_finite_in_one_head_changes_nothing(check_finite: bool) -> None:
    cache = KVCache(spec_of(keys="balanced", values="balanced"), check_finite=check_finite)
    fill(cache, *key_values(20))
    keys, values = key_values(60, seed=2)
    bad = mx.concatenate([keys[:1], mx.full((1, 60, 64), float("nan"), mx.float16)])
    with pytest.raises(InvalidInput, match="not finite"):
        cache.append(0, bad, values)
    assert cache.layers[0].num_tokens == 20
    fill(cache, keys, values)
    assert cache.num_sealed_blocks == (80 - 8) // 16
    assert mx.all(mx.isfinite(cache.get_keys(0)))
    cache.check()


@pytest.mark.parametrize(
    ("head_dim", "keys"),
    [(1, "mse4+mean"), (8, "balanced"), (8, "prod4+mean+out7"), (576, "small")],
)
def test_small_and_odd_dimensions_take_options(head_dim: int, keys: str) -> None:
    layer = LayerSpec(kv_heads=2, head_dim=head_dim, keys=keys, values="mse4+mean")
    cache = KVCache(CacheSpec([layer], page_tokens=16, recent_tokens=0))
    mx.random.seed(4)
    array = mx.random.normal((2, 70, head_dim)).astype(mx.float16)
    cache.append(0, array, array)
    error = (cache.get_keys(0) - array).astype(mx.float32).square().mean().item()
    assert error < 0.06
    assert mx.array_equal(cache.get_keys(0)[:, 64:], array[:, 64:])
    assert cache.attend(0, array[:, :3]).shape == (2, 3, head_dim)


def test_a_prompt_shorter_than_a_page_stays_exact() -> None:
    keys, values = key_values(15)
    cache = fill(KVCache(spec_of(keys="balanced", values="balanced")), keys, values)
    assert cache.num_sealed_blocks == 0
    assert mx.array_equal(cache.get_keys(0), keys)
