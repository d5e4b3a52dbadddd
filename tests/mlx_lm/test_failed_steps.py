"""Sessions whose steps fail midway, or whose pages go bad, and that go on all the same.

Oracle: a chat in a store of its own to which nothing happened.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from tests.mlx_lm import tiny_models
from tests.mlx_lm.tiny_models import greedy, prompt
from tqstore import Store
from tqstore.errors import Corrupt, InvalidInput, NotFound, PoolExhausted
from tqstore.mlx_lm import make_cache, model_line, session
from tqstore.paging.pager import Pager

EXACT = {"preset": "exact", "page_tokens": 16, "recent_tokens": 8}
PACKED = {"preset": "balanced", "page_tokens": 16, "recent_tokens": 8}


def logits(chat, model, tokens):
    out = model(mx.array([chat.feed(tokens)]), cache=chat.cache)[0, -1]
    mx.eval(out)
    return out


def fail_in(monkeypatch, model, index, error):
    """The layer's next call raises `error`; the one after goes through."""
    kind = type(model.layers[index])
    call, target, todo = kind.__call__, model.layers[index], [error]

    def failing(self, *args, **kwargs):
        if self is target and todo:
            raise todo.pop()
        return call(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", failing)


@pytest.mark.parametrize("error", [PoolExhausted("full for a moment"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [0, 100])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "falcon-h1"])
def test_the_same_prompt_again_after_a_failed_step(name, before, error, tmp_path, monkeypatch):
    model = tiny_models.model(name)
    first, whole = prompt(before, seed=1), prompt(before, seed=1) + prompt(60, seed=2)
    with Store.open(tmp_path / "hit") as store, Store.open(tmp_path / "spared") as other:
        chat, spared = session(store, model, "a", **EXACT), session(other, model, "a", **EXACT)
        for one in (chat, spared):
            if first:
                logits(one, model, first)
        fail_in(monkeypatch, model, 1, error)
        with pytest.raises(type(error)):
            logits(chat, model, whole)
        if name == "falcon-h1":  # how far its own states are cannot be told
            chat._has_failed = True
        found, expected = logits(chat, model, whole), logits(spared, model, whole)
        assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()
        assert chat.save().num_tokens == len(whole)
    with Store.open(tmp_path / "hit") as store:
        longer = [*whole, 5]
        chat = session(store, model, "b", **EXACT)
        found = logits(chat, model, longer)
        with Store.open(tmp_path / "third") as other:
            expected = logits(session(other, model, "c", **EXACT), model, longer)
        assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()


def test_follow_notices_that_a_step_failed(tmp_path, monkeypatch):
    model = tiny_models.model("falcon-h1")
    with Store.open(tmp_path / "s") as store:
        chat = session(store, model, "a", **EXACT)
        rest = chat.feed(prompt(40))
        fail_in(monkeypatch, model, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            list(chat.follow(generate_step(mx.array(rest), model, prompt_cache=chat.cache)))
        assert len(chat.feed(prompt(40))) == 40
        assert "a step did not get to the end" in chat.reason


def test_layers_out_of_step_are_refused_by_a_cache_alone(monkeypatch):
    model = tiny_models.model("qwen3")
    cache = make_cache(model, **PACKED)
    greedy(model, cache, prompt(40), 2)
    fail_in(monkeypatch, model, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(mx.array([[1, 2]]), cache=cache)
    with pytest.raises(InvalidInput, match="did not get to the end"):
        model(mx.array([[1, 2]]), cache=cache)


def test_saving_on_an_error_in_a_step_saves_the_pages_that_all_layers_hold(tmp_path, monkeypatch):
    model = tiny_models.model("qwen3")
    with Store.open(tmp_path / "s") as store:
        chat = session(store, model, "a", save_on_error=True, **EXACT)
        logits(chat, model, prompt(50))
        fail_in(monkeypatch, model, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt), chat:
            logits(chat, model, prompt(50) + prompt(20, seed=3))
        assert store.resume("a").num_tokens == 32  # of 50, the pages that every layer had sealed


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_page_gone_bad_is_computed_again_in_the_same_session(name, is_packed, tmp_path):
    model = tiny_models.model(name)
    path, told = tmp_path / "s", prompt(150, seed=1)
    with Store.open(path) as store, session(store, model, "a", **PACKED) as chat:
        logits(chat, model, told)
    for file in path.glob("ns/*/pages/*/c.*"):
        damaged = bytearray(file.read_bytes())
        for at in range(4096, len(damaged) - 4096, 512):  # every page, neither header nor index
            damaged[at] ^= 1
        file.chmod(0o600)
        file.write_bytes(damaged)
    asked = [*told, 5, 6]
    with (
        Store.open(path) as store,
        session(store, model, "a", packed_attention=is_packed, **PACKED) as chat,
    ):
        failures = 0
        while failures < 100:  # every page is bad, one is found out at a time
            try:
                found = logits(chat, model, asked)
                break
            except (Corrupt, NotFound):
                failures += 1
        assert failures > 0
        assert "can no longer be read" in chat.reason
    assert mx.isfinite(found).all()


def test_a_prompt_answered_again_and_again_is_not_coded_again_and_again(tmp_path):
    """Pages of a prompt that is fed again stay as they were coded the first time."""
    model = tiny_models.model("qwen3")
    asked = prompt(100, seed=1)
    with Store.open(tmp_path / "s") as store:
        chat = session(store, model, "a", **PACKED)
        first = logits(chat, model, asked)
        keys = chat._lines[0].kv.get_keys(0)[:, :88]
        for seed in range(5):
            greedy(model, chat.cache, prompt(40, seed=seed), 2)
            chat.extend(prompt(40, seed=seed))
            again = logits(chat, model, asked)
            assert chat.reused_tokens == 96
        assert chat._lines[0].kv.stats.paging["reopened_pages"] == 0
        assert mx.array_equal(chat._lines[0].kv.get_keys(0)[:, :80], keys[:, :80])
    assert mx.abs(again - first).max() < 0.3 * mx.abs(first).max()


def test_exact_pages_may_be_reopened(tmp_path):
    model = tiny_models.model("qwen3")
    with Store.open(tmp_path / "s") as store:
        chat = session(store, model, "a", **EXACT)
        first = logits(chat, model, prompt(100))
        chat.extend(prompt(40, seed=2))
        model(mx.array([prompt(40, seed=2)]), cache=chat.cache)
        again = logits(chat, model, prompt(100))
        assert chat.reused_tokens == 99
        assert mx.abs(again - first).max() < 1e-4 * mx.abs(first).max()


def fail_in_follow(chat, model, monkeypatch, tokens):
    fail_in(monkeypatch, model, 1, KeyboardInterrupt())
    rest = chat.feed(tokens)
    list(chat.follow(generate_step(mx.array(rest), model, prompt_cache=chat.cache)))


@pytest.mark.parametrize("save_on_error", [True, False])
def test_states_of_a_step_that_failed_are_not_saved(save_on_error, tmp_path, monkeypatch):
    model = tiny_models.model("qwen3-next")
    first, longer = prompt(40, seed=1), prompt(40, seed=1) + prompt(20, seed=2)
    with Store.open(tmp_path / "s") as store:
        with session(store, model, "a", **EXACT) as chat:
            logits(chat, model, first)
        chat = session(store, model, "a", save_on_error=save_on_error, **EXACT)
        with pytest.raises(KeyboardInterrupt), chat:
            fail_in_follow(chat, model, monkeypatch, longer)
        assert store.resume("a").num_tokens == 40
        with pytest.raises(InvalidInput, match="did not get to the end"):
            chat.save()
        found = logits(chat, model, longer)
        with Store.open(tmp_path / "spared") as other:
            expected = logits(session(other, model, "b", **EXACT), model, longer)
        assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("qwen3", "release"),
        ("gemma3", "release"),
        ("falcon-h1", "cache_list"),
        ("qwen3-next", "cache_list"),
    ],
)
def test_an_interrupt_while_a_session_changes_its_cache(name, target, tmp_path, monkeypatch):
    """Ctrl-C as the list is replaced, or in the last layer as a trim gives back pages."""
    model = tiny_models.model(name)
    other_prompt = prompt(50, seed=1) + prompt(40, seed=5)
    with Store.open(tmp_path / "s") as store:
        chat = session(store, model, "a", **EXACT)
        logits(chat, model, prompt(50, seed=1) + prompt(50, seed=2))
        calls = []
        if target == "release":
            release = Pager.release

            def interrupted(self, layer, refs):
                release(self, layer, refs)
                if layer == len(chat._lines[0].kv.layers) - 1 and not calls:
                    calls.append(layer)
                    raise KeyboardInterrupt

            monkeypatch.setattr(Pager, "release", interrupted)
        else:
            made = model_line.cache_list

            def interrupted_list(*args, **kwargs):
                if not calls:
                    calls.append(0)
                    raise KeyboardInterrupt
                return made(*args, **kwargs)

            monkeypatch.setattr(model_line, "cache_list", interrupted_list)
            chat._has_failed = True
        with pytest.raises(KeyboardInterrupt):
            logits(chat, model, other_prompt)
        assert calls
        found = logits(chat, model, other_prompt)
        with Store.open(tmp_path / "spared") as other:
            expected = logits(session(other, model, "b", **EXACT), model, other_prompt)
        assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()
        assert chat.save().num_tokens == len(other_prompt)


class Interrupting:
    """A page table whose next change is interrupted."""

    def __init__(self, table, method):
        self._table, self._method = table, method

    def __getattr__(self, name):
        if name == self._method:
            raise KeyboardInterrupt
        return getattr(self._table, name)

    def __len__(self):
        return len(self._table)


def test_a_layer_interrupted_between_tail_and_table_is_not_trusted(tmp_path):
    model = tiny_models.model("qwen3")
    whole = prompt(40, seed=1)
    with Store.open(tmp_path / "s") as store:
        chat = session(store, model, "a", **EXACT)
        logits(chat, model, whole[:20])
        layer = chat._lines[0].kv.layers[0]
        table, layer.table = layer.table, Interrupting(layer.table, "extend")
        with pytest.raises(KeyboardInterrupt):
            logits(chat, model, whole)
        layer.table = table
        with pytest.raises(InvalidInput, match="interrupted"):
            chat.save()
        found = logits(chat, model, whole)
        assert "interrupted" in chat.reason
        with Store.open(tmp_path / "spared") as other:
            expected = logits(session(other, model, "b", **EXACT), model, whole)
        assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()
