"""Paged layers inside real mlx-lm models: the same numbers as mlx-lm's own caches give.

Oracle throughout: the model on its own caches, fed in the same chunks.
"""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from tests.mlx_lm import tiny_models
from tests.mlx_lm.tiny_models import (
    ALL,
    FULL,
    HYBRID,
    WINDOWED,
    greedy,
    logits_in_chunks,
    prompt,
    split,
)
from tqstore.errors import InvalidInput
from tqstore.mlx_lm.cache import PagedLayerCache, make_cache
from tqstore.mlx_lm.probe import PagedEntry

SPLITS = [[110], [1], [7], [64, 1, 1, 30], [16], [23, 24, 25, 1], [100, 1]]


def exact_cache(model, **options):
    return make_cache(
        model, keys="exact", values="exact", page_tokens=16, recent_tokens=8, **options
    )


def paged_layers(cache):
    for entry in cache:
        for leaf in getattr(entry, "caches", [entry]):
            if isinstance(leaf, PagedLayerCache):
                yield leaf


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("name", FULL + HYBRID)
def test_exact_full_layers_give_the_same_bits(name, sizes):
    model = tiny_models.model(name)
    chunks = split(prompt(110), sizes)
    own = logits_in_chunks(model, make_prompt_cache(model), chunks)
    ours = logits_in_chunks(model, exact_cache(model), chunks)
    assert mx.array_equal(own, ours)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("name", WINDOWED)
def test_exact_windowed_layers_agree(name, sizes):
    """Not the same bits: keys stand in temporal order here and in ring order there."""
    model = tiny_models.model(name)
    chunks = split(prompt(110), sizes)
    own = logits_in_chunks(model, make_prompt_cache(model), chunks)
    ours = logits_in_chunks(model, exact_cache(model), chunks)
    assert mx.abs(own - ours).max() < 1e-5 * mx.abs(own).max()
    assert mx.array_equal(mx.argmax(own, -1), mx.argmax(ours, -1))


@pytest.mark.parametrize("name", ALL)
def test_the_models_do_look_at_their_caches(name):
    """Guard of the tests here: a lost or moved token would change the logits visibly."""
    model = tiny_models.model(name)
    tokens = prompt(60)
    changed = [*tokens[:40], (tokens[40] + 1) % tiny_models.VOCAB, *tokens[41:]]
    one, other = (
        logits_in_chunks(model, make_prompt_cache(model), [t[:59], t[59:]])[-1]
        for t in (tokens, changed)
    )
    assert mx.abs(one - other).max() > 1e-3 * mx.abs(one).max()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_exact_in_half_precision(name, dtype):
    model = tiny_models.build(name, dtype=dtype)
    chunks = split(prompt(100), [30, 1])
    own = logits_in_chunks(model, make_prompt_cache(model), chunks)
    ours = logits_in_chunks(model, exact_cache(model), chunks)
    assert ours.dtype == own.dtype
    if name == "qwen3":
        assert mx.array_equal(own, ours)
    else:
        close = mx.abs(own - ours).max() / mx.abs(own).max()
        assert close < 0.05


@pytest.mark.parametrize("step", [5, 64, 2048])
@pytest.mark.parametrize("name", ALL)
def test_generate_step_gives_the_same_tokens(name, step):
    model = tiny_models.model(name)
    tokens = mx.array(prompt(90))
    runs = [
        [
            token
            for token, _ in generate_step(
                tokens, model, prompt_cache=cache, max_tokens=40, prefill_step_size=step
            )
        ]
        for cache in (make_prompt_cache(model), exact_cache(model))
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 40


@pytest.mark.parametrize("name", ALL)
def test_quantized_caches_stay_close(name):
    """Not a quality figure (docs/quantization.md has those): packed keys go in and come out."""
    model = tiny_models.model(name)
    chunks = split(prompt(200), [100])
    own = logits_in_chunks(model, make_prompt_cache(model), chunks)[-100:]
    packed = make_cache(model, keys="prod8", values="int8", page_tokens=16, recent_tokens=8)
    ours = logits_in_chunks(model, packed, chunks)[-100:]
    error = mx.mean((own - ours) ** 2) / mx.var(own)
    assert 0 < error < 0.05


@pytest.mark.parametrize("name", [*FULL, "gemma3"])
def test_speculative_decoding(name):
    """The tokens of plain greedy decoding, whatever the draft model proposes and gets rejected."""
    model = tiny_models.model(name)
    expected = greedy(model, make_prompt_cache(model), prompt(70), 50)
    for draft in (model, tiny_models.build(name, seed=5)):
        cache = exact_cache(model) + exact_cache(draft)
        steps = speculative_generate_step(
            mx.array(prompt(70)),
            model,
            draft,
            prompt_cache=cache,
            max_tokens=50,
            num_draft_tokens=3,
        )
        assert [int(token) for token, _, _ in steps] == expected
        for layer in paged_layers(cache):
            layer.sequence.kv.check()


@pytest.mark.parametrize("count", [1, 7, 30, 31, 64, 129, 130])
@pytest.mark.parametrize("name", FULL)
def test_trim_then_continue_equals_never_having_been_there(name, count):
    model = tiny_models.model(name)
    tokens, other = prompt(130), prompt(20, seed=2)
    cache = exact_cache(model)
    logits_in_chunks(model, cache, [tokens])
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, count) == count
    assert {layer.offset for layer in paged_layers(cache)} == {130 - count}
    fresh = exact_cache(model)
    if count < 130:
        logits_in_chunks(model, fresh, [tokens[: 130 - count]])
    # Equal tokens, not bits: the prefix was computed in a run of another length.
    one, two = (logits_in_chunks(model, c, [other]) for c in (cache, fresh))
    assert mx.abs(one - two).max() < 1e-4 * mx.abs(two).max()


def test_trim_of_more_than_there_is_trims_all():
    model = tiny_models.model("llama")
    cache = exact_cache(model)
    logits_in_chunks(model, cache, [prompt(10)])
    assert trim_prompt_cache(cache, 11) == 10
    assert [layer.offset for layer in paged_layers(cache)] == [0, 0, 0]


def test_windowed_trim_within_recent_tokens_and_beyond():
    """A wrapped RotatingKVCache cannot go back at all; here it can until the pages are gone."""
    model = tiny_models.model("gemma3")
    tokens, other = prompt(200), prompt(9, seed=3)
    cache, stock = exact_cache(model), make_prompt_cache(model)
    logits_in_chunks(model, cache, split(tokens, [40]))
    logits_in_chunks(model, stock, split(tokens, [40]))
    assert can_trim_prompt_cache(cache)
    assert not can_trim_prompt_cache(stock)
    before = [layer.offset for layer in paged_layers(cache)]
    with pytest.raises(InvalidInput, match="windowed layer"):
        trim_prompt_cache(cache, 150)
    assert [layer.offset for layer in paged_layers(cache)] == before
    assert trim_prompt_cache(cache, 8) == 8
    fresh = exact_cache(model)
    logits_in_chunks(model, fresh, split(tokens[:192], [40]))
    one, two = (logits_in_chunks(model, c, [other]) for c in (cache, fresh))
    assert mx.abs(one - two).max() < 1e-4 * mx.abs(two).max()


def test_recurrent_states_are_not_trimmable():
    for name in ("qwen3-next", "falcon-h1"):
        cache = exact_cache(tiny_models.model(name))
        assert not can_trim_prompt_cache(cache)
        assert trim_prompt_cache(cache, 1) == 0


def test_layers_trimmed_unevenly_are_noticed():
    model = tiny_models.model("llama")
    cache = exact_cache(model)
    logits_in_chunks(model, cache, [prompt(40)])
    cache[0].trim(3)
    assert [layer.offset for layer in cache] == [37, 40, 40]
    with pytest.raises(InvalidInput, match=r"paged layers \[1, 2\] were not"):
        model(mx.array([[1]]), cache=cache)
    with pytest.raises(InvalidInput, match="cannot trim -1"):
        cache[1].trim(-1)
    cache[1].trim(3)
    cache[2].trim(3)
    assert [layer.offset for layer in cache] == [37, 37, 37]
    assert cache[0].sequence.kv.num_tokens == 37


@pytest.mark.parametrize("name", ALL)
def test_deepcopy_is_an_independent_fork(name):
    model = tiny_models.model(name)
    tokens, left, right = prompt(100), prompt(40, seed=2), prompt(40, seed=3)
    cache = exact_cache(model)
    logits_in_chunks(model, cache, [tokens])
    twin = copy.deepcopy(cache)
    kept = {id(layer.sequence) for layer in paged_layers(cache)}
    assert len({id(layer.sequence) for layer in paged_layers(twin)}) == 1
    assert not kept & {id(layer.sequence) for layer in paged_layers(twin)}
    for branch, tail in ((cache, left), (twin, right)):
        fresh = exact_cache(model)
        logits_in_chunks(model, fresh, [tokens])
        expected = logits_in_chunks(model, fresh, split(tail, [9, 1]))
        assert mx.array_equal(logits_in_chunks(model, branch, split(tail, [9, 1])), expected)


def test_a_copy_costs_the_tail_and_not_the_pages():
    model = tiny_models.model("llama")
    cache = exact_cache(model)
    logits_in_chunks(model, cache, [prompt(3000)])
    before = mx.get_active_memory()
    twins = [copy.deepcopy(cache) for _ in range(8)]
    mx.eval([[layer.state for layer in twin] for twin in twins])
    assert mx.get_active_memory() - before < cache[0].nbytes
    assert sum(layer.nbytes for layer in cache) == cache[0].sequence.kv.nbytes


def test_what_is_not_defined():
    layer = exact_cache(tiny_models.model("llama"))[0]
    for name in ("bits", "to_quantized", "__len__", "__bool__", "merge", "keys", "values"):
        assert not hasattr(layer, name), name
    assert layer.empty()
    assert layer.size() == 0


def test_kv_bits_leave_paged_layers_alone():
    model = tiny_models.model("llama")
    runs = []
    for bits in (None, 4):
        steps = generate_step(
            mx.array(prompt(50)),
            model,
            prompt_cache=exact_cache(model),
            max_tokens=5,
            kv_bits=bits,
            quantized_kv_start=0,
        )
        runs.append([int(token) for token, _ in steps])
    assert runs[0] == runs[1]


def test_memory_of_a_step_is_let_go():
    """The dense keys and values handed to a step are not kept, except for layers read again."""
    model = tiny_models.model("llama")
    packed = make_cache(model, keys="prod4", values="int8")
    logits_in_chunks(model, packed, split(prompt(4000), [500]))
    before = mx.get_active_memory()
    logits_in_chunks(model, packed, [[1]])
    dense = 4000 * 2 * 64 * 4
    assert mx.get_active_memory() - before < dense
    again = make_cache(tiny_models.model("gemma3n"))
    logits_in_chunks(tiny_models.model("gemma3n"), again, [prompt(30)])
    with pytest.raises(InvalidInput, match="nothing was appended in this step"):
        again[0].keys_and_values()


def one_layer(key_dtype=mx.float32, value_dtype=mx.float32, window=None, sinks=0):
    entry = PagedEntry(0, None, 2, 32, 16, key_dtype, value_dtype, window, sinks, False)
    from tqstore.kv_cache import KVCache as Paged
    from tqstore.mlx_lm.cache import PagedSequence
    from tqstore.mlx_lm.probe import ModelLayout

    spec = ModelLayout((entry,), ()).cache_spec(keys="exact", values="exact", page_tokens=8)
    return PagedLayerCache(PagedSequence(Paged(spec)), 0, entry)


def test_keys_and_values_of_different_dtypes_come_back_as_they_went():
    layer = one_layer(mx.bfloat16, mx.float16)
    own = KVCache()
    for count in (50, 1, 7):
        keys = mx.random.normal((1, 2, count, 32)).astype(mx.bfloat16)
        values = mx.random.normal((1, 2, count, 16)).astype(mx.float16)
        for ours, theirs in zip(
            layer.update_and_fetch(keys, values), own.update_and_fetch(keys, values), strict=True
        ):
            assert ours.dtype == theirs.dtype
            assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("sinks", [0, 3])
def test_windowed_layer_returns_what_the_ring_holds(sinks):
    layer = one_layer(window=10, sinks=sinks)
    own = RotatingKVCache(max_size=10 + sinks, keep=sinks)
    for count in (4, 1, 1, 30, 1, 1, 1, 17, 1, 12):
        keys = mx.random.normal((1, 2, count, 32))
        values = keys[..., :16]
        ours, _ = layer.update_and_fetch(keys, values)
        theirs, _ = own.update_and_fetch(keys, values)
        assert ours.shape == theirs.shape
        rows = [sorted(array[0, 0].tolist()) for array in (ours, theirs)]
        assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("keys", "values", "problem"),
    [
        ((2, 2, 3, 32), (2, 2, 3, 16), "holds one sequence"),
        ((2, 3, 32), (2, 3, 16), "not \\[1, heads"),
        ((1, 2, 3, 31), (1, 2, 3, 16), "31"),
        ((1, 3, 3, 32), (1, 3, 3, 16), "3"),
        ((1, 2, 3, 32), (1, 2, 4, 16), "values"),
        ((1, 2, 0, 32), (1, 2, 0, 16), "shape"),
    ],
)
def test_wrong_shapes_are_refused_and_nothing_changes(keys, values, problem):
    layer = one_layer()
    layer.update_and_fetch(mx.zeros((1, 2, 5, 32)), mx.zeros((1, 2, 5, 16)))
    with pytest.raises(InvalidInput, match=problem):
        layer.update_and_fetch(mx.zeros(keys), mx.zeros(values))
    assert layer.offset == 5


def test_wrong_dtypes_and_states_are_refused():
    layer = one_layer()
    with pytest.raises(InvalidInput, match="float16"):
        layer.update_and_fetch(
            mx.zeros((1, 2, 5, 32), mx.float16), mx.zeros((1, 2, 5, 16), mx.float16)
        )
    with pytest.raises(InvalidInput, match="cannot be set"):
        layer.state = layer.state
    with pytest.raises(InvalidInput, match="unknown codec"):
        make_cache(tiny_models.model("llama"), keys="prod99")
