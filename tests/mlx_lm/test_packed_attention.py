"""Attention straight over packed pages inside mlx-lm models.

Oracle: the same cache answering with decoded arrays, and mlx-lm's own attention over them.
"""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx_lm.models.base
import mlx_lm.models.qwen3
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

from tests.mlx_lm import tiny_models
from tests.mlx_lm.tiny_models import ALL, logits_in_chunks, prompt
from tqstore import Store
from tqstore.errors import InvalidInput
from tqstore.layer_cache import LayerCache
from tqstore.mlx_lm import make_cache, packed_attention, probe, session
from tqstore.mlx_lm.attention_hook import NAME, attention_modules, hooked

# 137 tokens: 8 sealed pages and 9 exact tokens, so that the next few seal nothing and both ways see
# the same pages and the same exact tokens.
SMALL = {"page_tokens": 16, "recent_tokens": 8}
# Models whose paged layers all go straight into mlx-lm's attention function.
PACKABLE = [name for name in ALL if name != "gemma3n"]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers attended to packed, one item a call."""
    calls: list[int] = []
    attend = LayerCache.attend

    def counting(self, *args):
        calls.append(self.layer)
        return attend(self, *args)

    monkeypatch.setattr(LayerCache, "attend", counting)
    return calls


@pytest.mark.parametrize("name", ALL)
def test_probe_finds_where_keys_go_straight_into_attention(name):
    layout = probe(tiny_models.model(name))
    modules = {item.attention for item in layout.paged}
    if name in PACKABLE:
        assert modules == {type(tiny_models.model(name)).__module__}
    else:  # its last layers read the keys of earlier ones again
        assert modules == {None}


@pytest.mark.parametrize("preset", ["balanced", "card", "near-lossless"])
@pytest.mark.parametrize("name", PACKABLE)
def test_logits_are_those_over_decoded_arrays(name, preset, monkeypatch):
    model = tiny_models.model(name)
    chunks = [prompt(137), [5]]
    decoded = logits_in_chunks(model, make_cache(model, preset=preset, **SMALL), chunks)
    calls = counted(monkeypatch)
    with packed_attention(model):
        packed = logits_in_chunks(model, make_cache(model, preset=preset, **SMALL), chunks)
    assert sorted(set(calls)) == list(range(len(probe(model).paged)))
    largest = mx.abs(decoded).max()
    assert mx.abs(packed[-1] - decoded[-1]).max() < 2e-4 * largest


@pytest.mark.parametrize("num_new", [2, 3, 8])
def test_several_new_tokens_at_once(num_new, monkeypatch):
    model = tiny_models.model("qwen3")
    chunks = [prompt(137), prompt(num_new)]
    decoded = logits_in_chunks(model, make_cache(model, **SMALL), chunks)
    calls = counted(monkeypatch)
    with packed_attention(model):
        packed = logits_in_chunks(model, make_cache(model, **SMALL), chunks)
    assert calls
    close = mx.abs(packed[-num_new:] - decoded[-num_new:]).max() / mx.abs(decoded).max()
    assert close < 2e-4


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_masks_of_windowed_layers_and_several_tokens_fall_back_to_decoding(name):
    """RotatingKVCache asks for an array where a window is full: decoded arrays answer it."""
    model = tiny_models.model(name)
    chunks = [prompt(137), prompt(5), [3]]
    decoded = logits_in_chunks(model, make_cache(model, preset="near-lossless", **SMALL), chunks)
    with packed_attention(model):
        cache = make_cache(model, preset="near-lossless", **SMALL)
        packed = logits_in_chunks(model, cache, chunks)
    assert mx.abs(packed - decoded).max() < 0.01 * mx.abs(decoded).max()


def test_exact_layers_keep_giving_the_same_bits(monkeypatch):
    model = tiny_models.model("qwen3")
    chunks = [prompt(110), [1], [2]]
    own = logits_in_chunks(model, make_prompt_cache(model), chunks)
    calls = counted(monkeypatch)
    with packed_attention(model):
        ours = logits_in_chunks(model, make_cache(model, preset="exact", **SMALL), chunks)
    assert mx.array_equal(own, ours)
    assert not calls


def test_other_caches_of_the_same_model_are_not_touched():
    model = tiny_models.model("qwen3")
    tokens = mx.array(prompt(60))

    def run():
        return [t for t, _ in generate_step(tokens, model, max_tokens=20)]

    plain = run()
    with packed_attention(model):
        assert run() == plain
        thread_found = []
        thread = threading.Thread(target=lambda: thread_found.extend(run()))
        thread.start()
        thread.join()
    assert thread_found == plain


def test_is_undone_however_it_ends():
    original = mlx_lm.models.base.scaled_dot_product_attention
    model = tiny_models.model("qwen3")
    bound = mlx_lm.models.qwen3
    assert bound in attention_modules(model)
    with packed_attention(model):
        assert bound.scaled_dot_product_attention is not original
        with packed_attention(model):
            probe(model)
        assert bound.scaled_dot_product_attention is not original
    assert bound.scaled_dot_product_attention is original
    with pytest.raises(RuntimeError), packed_attention(model):
        raise RuntimeError
    assert bound.scaled_dot_product_attention is original
    assert mlx_lm.models.base.scaled_dot_product_attention is original


def test_a_later_replacement_by_someone_else_is_left_alone(monkeypatch):
    model, bound = tiny_models.model("qwen3"), mlx_lm.models.qwen3
    monkeypatch.setattr(bound, NAME, getattr(bound, NAME))  # put back when this test ends
    with packed_attention(model):
        setattr(bound, NAME, print)
    assert getattr(bound, NAME) is print


def test_handlers_are_asked_newest_first_and_may_pass():
    model = tiny_models.model("qwen3")
    seen = []
    modules = attention_modules(model)
    with (
        hooked(modules, lambda *_: seen.append("outer")),
        hooked(modules, lambda *_: seen.append("inner")),
    ):
        mx.eval(model(mx.array([[1]])))
    assert seen == ["inner", "outer"] * 3


def test_looking_into_packed_keys_is_refused_with_what_to_do():
    model = tiny_models.model("qwen3")
    cache = make_cache(model, **SMALL)
    logits_in_chunks(model, cache, [prompt(60)])
    with packed_attention(model):
        keys, values = cache[0].update_and_fetch(mx.zeros((1, 2, 1, 32)), mx.zeros((1, 2, 1, 32)))
    assert (keys.shape, values.ndim) == ((1, 2, 61, 32), 4)
    assert not hasattr(keys, "bits")
    with pytest.raises(InvalidInput, match="packed_attention=False"):
        keys.swapaxes(1, 2)


def test_a_session_attends_packed_while_it_is_open(tmp_path, monkeypatch):
    model = tiny_models.model("qwen3")
    calls = counted(monkeypatch)

    def answer(store, name, **options):
        with session(store, model, name, **SMALL, **options) as chat:
            rest = chat.feed(prompt(100))
            steps = generate_step(mx.array(rest), model, prompt_cache=chat.cache, max_tokens=30)
            return [token for token, _ in chat.follow(steps)]

    with Store.open(tmp_path / "store") as store:
        decoded = answer(store, "decoded", packed_attention=False, preset="near-lossless")
        assert not calls
        packed = answer(store, "packed", preset="near-lossless")
        assert calls
        assert packed == decoded
    original = mlx_lm.models.base.scaled_dot_product_attention
    assert mlx_lm.models.qwen3.scaled_dot_product_attention is original


def test_resumed_is_never_stopped_with_packed_attention(tmp_path):
    model = tiny_models.model("gemma3")

    def go_on(chat, tokens):
        rest = chat.feed(chat.tokens + tokens)
        steps = generate_step(mx.array(rest), model, prompt_cache=chat.cache, max_tokens=25)
        return [(token, logprobs) for token, logprobs in chat.follow(steps)]

    with Store.open(tmp_path / "whole") as store, session(store, model, "chat", **SMALL) as chat:
        go_on(chat, prompt(137))
        expected = go_on(chat, prompt(40))
    with Store.open(tmp_path / "twice") as store, session(store, model, "chat", **SMALL) as chat:
        go_on(chat, prompt(137))
    with Store.open(tmp_path / "twice") as store, session(store, model, "chat", **SMALL) as chat:
        found = go_on(chat, prompt(40))
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert mx.array_equal(one, other)


def test_speculative_decoding_gives_the_same_tokens():
    model, draft = tiny_models.model("qwen3"), tiny_models.model("llama")
    tokens = mx.array(prompt(90))

    def run():
        cache = make_cache(model, preset="near-lossless", **SMALL)
        cache += make_cache(draft, preset="near-lossless", **SMALL)
        steps = speculative_generate_step(
            tokens, model, draft, prompt_cache=cache, max_tokens=30, num_draft_tokens=3
        )
        return [token for token, *_ in steps]

    decoded = run()
    with packed_attention(model, draft):
        assert run() == decoded


def test_it_is_for_the_model_the_session_and_the_thread_that_asked(tmp_path, monkeypatch):
    one, other = tiny_models.build("qwen3"), tiny_models.build("qwen3")
    calls = counted(monkeypatch)

    def steps(model, cache):
        logits_in_chunks(model, cache, [prompt(100), [5]])

    with Store.open(tmp_path / "s") as store:
        with (
            session(store, one, "a", **SMALL),
            session(store, one, "b", packed_attention=False, **SMALL) as decoded,
            session(store, other, "c", packed_attention=False, **SMALL) as of_other,
        ):
            steps(one, decoded.cache)
            steps(other, of_other.cache)
            steps(other, make_cache(other, **SMALL))
            thread = threading.Thread(target=lambda: steps(one, make_cache(one, **SMALL)))
            thread.start()
            thread.join()
        assert not calls
    with packed_attention(one):
        cache = make_cache(one, **SMALL)
        steps(one, cache)
        assert len(calls) == 3
        steps(other, make_cache(other, **SMALL))
        assert len(calls) == 3


def test_a_session_may_be_entered_twice(tmp_path, monkeypatch):
    model = tiny_models.model("qwen3")
    calls = counted(monkeypatch)
    with Store.open(tmp_path / "s") as store, session(store, model, "a", **SMALL) as chat:
        with chat:
            rest = chat.feed(prompt(100))
            mx.eval(model(mx.array([rest]), cache=chat.cache))
        chat.extend([5])
        mx.eval(model(mx.array([[5]]), cache=chat.cache))
        assert len(calls) == 3
