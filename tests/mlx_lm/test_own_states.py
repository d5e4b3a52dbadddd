"""States of the model's own cache objects: exact, by content, never by a class's stored name."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from tests.mlx_lm import tiny_models
from tests.mlx_lm.test_probe import Wrapped
from tests.mlx_lm.tiny_models import HYBRID, logits_in_chunks, prompt
from tqstore import Store
from tqstore.errors import Corrupt, Incompatible, InvalidInput
from tqstore.mlx_lm.cache import make_cache
from tqstore.mlx_lm.model_line import ModelLine
from tqstore.mlx_lm.own_states import _flatten, _unflatten, collect, restore
from tqstore.mlx_lm.probe import probe

plain = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5)
leaves = plain | st.integers(0, 3).map(lambda n: mx.arange(n))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one, other) -> bool:
    if isinstance(one, mx.array):
        return isinstance(other, mx.array) and mx.array_equal(one, other).item()
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@settings(max_examples=200, deadline=None)
@given(trees)
def test_trees_come_back(tree):
    arrays: list[mx.array] = []
    meta = _flatten(tree, arrays, "here")
    assert same(tree, _unflatten(meta, arrays, "here"))


@pytest.mark.parametrize(
    "meta",
    [
        None,
        3,
        {},
        {"array": 5},
        {"array": -1},
        {"array": "0"},
        {"list": 3},
        {"dict": [1]},
        {"x": 1},
    ],
    ids=repr,
)
def test_malformed_trees_are_corrupt(meta):
    with pytest.raises(Corrupt, match="malformed"):
        _unflatten(meta, [mx.zeros(1)], "here")


def test_what_cannot_be_stored_is_named():
    with pytest.raises(InvalidInput, match="here holds a builtin_function"):
        _flatten({"f": [1, len]}, [], "here")


@pytest.mark.parametrize("name", HYBRID)
def test_restored_objects_continue_bit_for_bit(name):
    model = tiny_models.model(name)
    layout = probe(model)
    cache, twin = (make_cache(model, keys="exact", values="exact") for _ in range(2))
    logits_in_chunks(model, cache, [prompt(30)])
    logits_in_chunks(model, twin, [prompt(30, seed=9)])  # other states, to be replaced
    states = collect(cache, layout)
    assert all(state.arrays for state in states)
    restore(twin, layout, states)
    for one, other in zip(collect(cache, layout), collect(twin, layout), strict=True):
        assert one.meta == other.meta
        assert all(map(mx.array_equal, one.arrays, other.arrays))


def test_states_of_other_objects_are_refused_and_nothing_is_set():
    model = tiny_models.model("qwen3-next")
    layout = probe(model)
    cache, fresh = make_cache(model), make_cache(model)
    logits_in_chunks(model, cache, [prompt(30)])
    states = collect(cache, layout)
    renamed = [*states[:-1], replace(states[-1], class_name="KVCache")]
    for wrong in (states[:-1], renamed, [*states, states[0]]):
        with pytest.raises(Incompatible, match="own cache objects"):
            restore(fresh, layout, wrong)
    broken = [*states[:-1], replace(states[-1], meta={"array": 99})]
    with pytest.raises(Corrupt):
        restore(fresh, layout, broken)
    older = [*states[:-1], replace(states[-1], arrays=[], meta={"tuple": [{"value": ""}] * 3})]
    with pytest.raises(Incompatible, match="the state of a ArraysCache differs: stored '3 parts'"):
        restore(fresh, layout, older)
    assert all(entry.empty() for entry in fresh)


def reads_inside(cache, keys):
    """One cache to page, and one that is not because the model reads its keys."""
    cache[0].update_and_fetch(keys, keys)
    cache[1].update_and_fetch(keys + 1, keys)
    assert cache[1].keys is not None


def test_own_plain_caches_go_back_with_the_paged_ones(store_dir):
    model = Wrapped(reads_inside, lambda: [KVCache(), KVCache()])
    layout = probe(model)
    assert [item.entry for item in layout.own] == [1]
    spec = layout.cache_spec(keys="exact", values="exact", page_tokens=8)
    with Store.open(store_dir) as store:
        line = ModelLine(store, model, "line", layout, spec, "0" * 64)
        model(mx.zeros((1, 50)), cache=line.cache)
        assert line.rewind(20) == ""
        assert [entry.offset for entry in line.cache] == [20, 20]
        line.cache[1].trim(1)  # out of step: not to be trusted
        assert "can only be reused whole" in line.rewind(10)
        assert line.num_tokens == 20
