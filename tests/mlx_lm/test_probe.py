"""The layout found by running one token lazily, against what mlx-lm's own caches end up holding."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from tests.mlx_lm import tiny_models
from tqstore.errors import InvalidInput
from tqstore.mlx_lm.probe import OwnEntry, probe
from tqstore.presets import PRESETS


def leaves(cache):
    for index, entry in enumerate(cache):
        if isinstance(entry, CacheList):
            yield from ((index, part, leaf) for part, leaf in enumerate(entry.caches))
        else:
            yield index, None, entry


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_layout_equals_what_a_real_run_fills(name):
    """Oracle: the model's own cache after really computing a few tokens."""
    model = tiny_models.model(name)
    layout = probe(model)
    real = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=real), [entry.state for entry in real])
    paged = {(item.entry, item.part): item for item in layout.paged}
    own = {(item.entry, item.part): item for item in layout.own}
    assert not paged.keys() & own.keys()
    for index, part, leaf in leaves(real):
        if isinstance(leaf, ArraysCache | ChunkedKVCache):
            assert own[index, part].class_name == type(leaf).__name__
            continue
        item = paged[index, part]
        assert (item.kv_heads, item.key_dim) == (leaf.keys.shape[1], leaf.keys.shape[3])
        assert item.value_dim == leaf.values.shape[3]
        assert item.key_dtype == leaf.keys.dtype
        windowed = isinstance(leaf, RotatingKVCache)
        assert item.window == (leaf.max_size if windowed else None)
        del paged[index, part]
    assert not paged


def test_nothing_is_computed():
    """A model of 20 GB that was never evaluated is probed in next to no memory."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=8192,
        num_hidden_layers=4,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        vocab_size=128_000,
    )
    model = llama.Model(args)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    layout = probe(model)
    assert mx.get_peak_memory() - before < 1 << 20
    assert [(item.kv_heads, item.key_dim) for item in layout.paged] == [(8, 128)] * 4


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_dtype_is_the_models(dtype):
    layout = probe(tiny_models.build("qwen3", dtype=dtype))
    assert {item.dtype for item in layout.paged} == {str(dtype).split(".")[-1]}


def test_layers_read_again_are_marked():
    layout = probe(tiny_models.model("gemma3n"))
    assert [item.is_read_again for item in layout.paged] == [True, True]
    assert not any(item.is_read_again for item in probe(tiny_models.model("gemma3")).paged)


class Wrapped(nn.Module):
    """A model around `attend`, which is given the cache and one token's keys and values."""

    def __init__(self, attend, make):
        super().__init__()
        self._attend = attend
        self._make = make
        self.layers = []

    def make_cache(self):
        return self._make()

    def __call__(self, inputs, cache=None):
        keys = mx.zeros((1, 2, inputs.shape[1], 32))
        self._attend(cache, keys)
        return keys


def reaches_inside(cache, keys):
    cache[0].update_and_fetch(keys, keys)
    cache[0].keys = cache[0].keys + 1


def updates_twice(cache, keys):
    cache[0].update_and_fetch(keys, keys)
    cache[0].update_and_fetch(keys, keys)


def never_updates(cache, _keys):
    assert cache[0].offset == 0


def empty_values(cache, keys):
    cache[0].update_and_fetch(keys, keys[..., :0])


def integer_keys(cache, keys):
    cache[0].update_and_fetch(keys.astype(mx.uint8), keys)


class OwnKind(KVCache):
    pass


@pytest.mark.parametrize(
    ("attend", "make", "reason"),
    [
        (reaches_inside, lambda: [KVCache()], "uses its keys"),
        (updates_twice, lambda: [KVCache()], "2 times a step"),
        (never_updates, lambda: [KVCache()], "0 times a step"),
        (empty_values, lambda: [KVCache()], "values have shape"),
        (integer_keys, lambda: [KVCache()], "uint8"),
        (never_updates, lambda: [OwnKind()], "OwnKind is not"),
    ],
)
def test_what_cannot_be_paged_stays_the_models_own(attend, make, reason):
    layout = probe(Wrapped(attend, make))
    (item,) = layout.own
    assert isinstance(item, OwnEntry)
    assert reason in item.reason
    with pytest.raises(InvalidInput, match=reason):
        layout.cache_spec()


def test_isinstance_and_hasattr_hold_while_probing():
    seen = []

    def checks(cache, keys):
        seen.extend([isinstance(cache[0], KVCache), hasattr(cache[0], "bits"), bool(cache[0])])
        cache[0].update_and_fetch(keys, keys)

    assert len(probe(Wrapped(checks, lambda: [KVCache()])).paged) == 1
    assert seen == [True, False, True]


def test_kept_first_tokens_are_not_part_of_the_window():
    def attend(cache, keys):
        cache[0].update_and_fetch(keys, keys)

    (item,) = probe(Wrapped(attend, lambda: [RotatingKVCache(max_size=20, keep=4)])).paged
    assert (item.window, item.sink_tokens) == (16, 4)


def test_mixed_dtypes_take_the_one_that_holds_both():
    def attend(cache, keys):
        cache[0].update_and_fetch(keys.astype(mx.bfloat16), keys.astype(mx.float16))

    (item,) = probe(Wrapped(attend, lambda: [KVCache()])).paged
    assert item.dtype == "float32"


def test_codecs_for_each_layer():
    layout = probe(tiny_models.model("llama"))
    spec = layout.cache_spec(keys=["exact", "prod4", "uni4"], values="int8", page_tokens=16)
    assert [str(page.keys) for page in spec.page_specs] == ["exact", "prod4", "uni4"]
    with pytest.raises(InvalidInput, match="2 codecs for keys of 3"):
        layout.cache_spec(keys=["exact", "exact"])
    with pytest.raises(InvalidInput, match="unknown codec"):
        layout.cache_spec(keys="prod9")


@pytest.mark.parametrize("model", [None, "llama", nn.Linear(4, 4)])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(InvalidInput):
        probe(model)


def test_a_preset_names_both_codecs_and_either_may_be_replaced():
    layout = probe(tiny_models.model("llama"))
    balanced = layout.cache_spec(preset="balanced").page_specs[0]
    chosen = PRESETS["balanced"]
    assert (str(balanced.keys), str(balanced.values)) == (chosen.keys, chosen.values)
    replaced = layout.cache_spec(preset="balanced", values="int8").page_specs[0]
    assert (str(replaced.keys), str(replaced.values)) == (chosen.keys, "int8")
    by_name = layout.cache_spec(keys="balanced", values="balanced").page_specs[0]
    assert by_name == balanced
    assert layout.cache_spec().page_specs == layout.cache_spec(preset="balanced").page_specs
    with pytest.raises(InvalidInput, match="unknown preset 'best'"):
        layout.cache_spec(preset="best")
