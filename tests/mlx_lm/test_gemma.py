"""The real model: windows that wrap, packed pages, and a session resumed by another store object.

The logits of mlx-lm's own caches, fed in the same chunks, are the oracle.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.mlx_lm.tiny_models import greedy, split
from tools import real_model
from tqstore import Store
from tqstore.mlx_lm import make_cache, probe, session

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.xdist_group("real_model"),
    pytest.mark.skipif(not real_model.is_available(), reason="the `model` extra is not installed"),
]
WINDOW = 512
PROMPT = 600  # so that the windows have wrapped


@pytest.fixture(scope="module")
def gemma():
    return real_model.load()


@pytest.fixture(scope="module")
def tokens(gemma):
    _, tokenizer = gemma
    return tokenizer.encode(topics["truth"] + topics["assignment"])[:PROMPT]


@pytest.fixture(scope="module")
def expected(gemma, tokens):
    """(logits of the last chunk, greedy continuation) by mlx-lm's own caches."""
    model, _ = gemma
    cache = make_prompt_cache(model)
    chunks = split(tokens[:-1], [400])
    for chunk in chunks:
        logits = model(mx.array([chunk]), cache=cache)[0, -1]
        mx.eval(logits, [entry.state for entry in cache])
    return logits, greedy(model, cache, tokens[-1:], 12)


def test_layout(gemma):
    layout = probe(gemma[0])
    assert not layout.own
    assert [item.window for item in layout.paged] == ([WINDOW] * 5 + [None]) * 3
    assert {(item.kv_heads, item.key_dim) for item in layout.paged} == {(1, 256)}


def test_exact_pages_give_the_same_answer(gemma, tokens, expected):
    model, _ = gemma
    cache = make_cache(model, keys="exact", values="exact")
    for chunk in split(tokens[:-1], [400]):
        logits = model(mx.array([chunk]), cache=cache)[0, -1]
        mx.eval(logits, [entry.state for entry in cache])
    assert mx.abs(logits - expected[0]).max() < 1e-4 * mx.abs(expected[0]).max()
    assert greedy(model, cache, tokens[-1:], 12) == expected[1]


def test_packed_session_resumes_and_answers_alike(gemma, tokens, tmp_path):
    """prod4 keys, int8 values: resumed equals never stopped, and a diverging prompt goes back to
    the last whole page before it differs."""
    model, tokenizer = gemma
    question = tokenizer.encode("\n\nIn one sentence, what is false?", add_special_tokens=False)
    with Store.open(tmp_path / "store") as store:
        chat = session(store, model, "chat")
        told = tokens + greedy(model, chat.cache, chat.feed(tokens), 8)
        chat.extend(told[PROMPT:])
        chat.save()
        asked = told + question
        never_stopped = greedy(model, chat.cache, chat.feed(asked), 12)
    with Store.open(tmp_path / "store") as store:
        chat = session(store, model, "chat")
        rest = chat.feed(asked)
        assert (chat.reused_tokens, rest) == (len(told), question)
        assert greedy(model, chat.cache, rest, 12) == never_stopped
        other = [*tokens[:-50], *question]
        rest = chat.feed(other)
        whole_pages = (PROMPT - 50) // 64 * 64
        assert chat.reused_tokens == whole_pages
        assert rest == other[whole_pages:]
