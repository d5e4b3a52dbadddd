"""Sessions: resumed is the same as never stopped, and what cannot be reused says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.mlx_lm import tiny_models
from tests.mlx_lm.tiny_models import ALL, FULL, HYBRID, VOCAB, WINDOW, greedy, prompt
from tqstore import KVCache, Store
from tqstore.errors import Incompatible, InvalidInput
from tqstore.mlx_lm import session

EXACT = {"keys": "exact", "values": "exact"}
PACKED = {"keys": "prod4", "values": "int8"}
SMALL = {"page_tokens": 16, "recent_tokens": 8}


class Processes:
    """Opens one folder again and again, as other processes would: nothing hot is shared."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._stack = stack

    def open(self) -> Store:
        return self._stack.enter_context(Store.open(self.path))


@pytest.fixture
def processes(store_dir):
    with ExitStack() as stack:
        yield Processes(store_dir, stack)


@pytest.fixture
def store(processes):
    return processes.open()


def turn(chat, model, tokens: list[int], count: int) -> list[int]:
    rest = chat.feed(tokens)
    out = greedy(model, chat.cache, rest, count)
    chat.extend(out)
    return out


@pytest.mark.parametrize("codecs", [EXACT, PACKED], ids=["exact", "prod4-int8"])
@pytest.mark.parametrize("name", ALL)
def test_resumed_goes_on_as_if_never_stopped(processes, store, name, codecs):
    """Three turns in one process against three processes' worth of sessions, token by token."""
    model = tiny_models.model(name)
    told, parts = [], []
    with session(store, model, "whole", **codecs, **SMALL) as whole:
        for number in range(3):
            told = told + prompt(70 + number, seed=number)
            expected = turn(whole, model, told, 15)
            with session(processes.open(), model, "parts", **codecs, **SMALL) as chat:
                before = len(parts)
                parts = told
                out = turn(chat, model, told, 15)
                assert chat.reused_tokens == before
            assert out == expected
            told = told + out
            parts = told


@pytest.mark.parametrize("name", [*FULL, *HYBRID])
def test_exact_resumed_equals_mlx_lms_own_cache_fed_alike(processes, name):
    model = tiny_models.model(name)
    own, told = make_prompt_cache(model), []
    for number in range(3):
        rest = prompt(50, seed=number)
        told = told + rest
        with session(processes.open(), model, "chat", **EXACT, **SMALL) as chat:
            assert chat.feed(told) == rest
            tokens = mx.array([rest])
            assert mx.array_equal(model(tokens, cache=chat.cache)[0], model(tokens, cache=own)[0])


def test_killed_right_after_saving(tmp_path):
    """SIGKILL as soon as save() has returned; the next process has everything."""
    script = """
import os, signal, sys
from tests.mlx_lm import tiny_models
from tqstore import KVCache, Store
from tqstore.mlx_lm import session
name, path = sys.argv[1:]
model = tiny_models.model(name)
chat = session(Store.open(path), model, "chat", page_tokens=16, recent_tokens=8)
rest = chat.feed(tiny_models.prompt(100))
chat.extend(tiny_models.greedy(model, chat.cache, rest, 20))
chat.save()
os.kill(os.getpid(), signal.SIGKILL)
"""
    for name in ("qwen3", "gemma3", "qwen3-next"):
        path = tmp_path / name
        run = subprocess.run(
            [sys.executable, "-c", script, name, str(path)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": ""},
            check=False,
        )
        assert run.returncode == -signal.SIGKILL
        model = tiny_models.model(name)
        with Store.open(path) as store:
            chat = session(store, model, "chat", **SMALL)
            assert len(chat.tokens) == chat.num_cached == 120
            told = [*chat.tokens, *prompt(10, seed=4)]
            out = turn(chat, model, told, 20)
            assert chat.reused_tokens == 120
        with Store.open(tmp_path / f"{name}-uninterrupted") as store:
            chat = session(store, model, "chat", **SMALL)
            assert prompt(100) + turn(chat, model, prompt(100), 20) == told[:120]
            assert turn(chat, model, told, 20) == out


@pytest.mark.parametrize(
    ("ask", "reused", "reason"),
    [
        (lambda t: t, 119, "all but the last"),
        (lambda t: t[:60], 59, "all but the last"),
        (lambda t: [*t, 1, 2], 120, "all 120 tokens"),
        (
            lambda t: [*t[:77], (t[77] + 1) % VOCAB, *t[78:]],
            77,
            "differs from the session at token 77",
        ),
        (lambda t: [(t[0] + 1) % VOCAB, *t[1:]], 0, "differs from the session at token 0"),
        (lambda t: t[:1], 0, "all but the last"),
    ],
    ids=["same", "shorter", "longer", "diverging", "other", "one"],
)
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_longest_equal_prefix_and_never_all(processes, store, name, ask, reused, reason):
    model = tiny_models.model(name)
    with session(store, model, "chat", **EXACT, **SMALL) as chat:
        turn(chat, model, prompt(100), 20)
        told = chat.tokens
    asked = ask(told)
    chat = session(processes.open(), model, "chat", **EXACT, **SMALL)
    rest = chat.feed(asked)
    assert rest == asked[reused:]
    assert rest
    assert (chat.reused_tokens, chat.num_cached) == (reused, reused)
    assert reason in chat.reason
    fresh = make_prompt_cache(model)
    if reused:
        mx.eval(model(mx.array([asked[:reused]]), cache=fresh))
    one, two = (model(mx.array([rest]), cache=cache)[0, -1] for cache in (chat.cache, fresh))
    assert mx.abs(one - two).max() < 1e-4 * mx.abs(two).max()


@pytest.mark.parametrize("name", HYBRID)
def test_own_states_are_reused_whole_or_not_at_all(processes, store, name):
    model = tiny_models.model(name)
    with session(store, model, "chat", **EXACT, **SMALL) as chat:
        turn(chat, model, prompt(100), 20)
        told = chat.tokens
    for asked in (told, told[:80], [*told[:80], 1, 2, 3]):
        chat = session(processes.open(), model, "chat", **EXACT, **SMALL)
        assert chat.feed(asked) == asked
        assert chat.reused_tokens == chat.num_cached == 0
        assert "can only be reused whole" in chat.reason
        assert all(
            leaf.empty() for entry in chat.cache for leaf in getattr(entry, "caches", [entry])
        )
    chat = session(processes.open(), model, "chat", **EXACT, **SMALL)
    assert chat.feed([*told, 5]) == [5]


def test_windowed_layers_go_back_to_any_block_from_the_store(processes, store):
    """What a wrapped ring cannot do: the pages before the window are still in the store."""
    model = tiny_models.model("gemma3")
    told = prompt(20 * WINDOW)
    with session(store, model, "chat", **EXACT, **SMALL) as chat:
        for start in range(0, len(told), 50):
            rest = chat.feed(told[: start + 50])
            mx.eval(model(mx.array([rest]), cache=chat.cache))
            chat.save()
    asked = [*told[:200], 1, 2, 3]
    chat = session(processes.open(), model, "chat", **EXACT, **SMALL)
    chat.feed(asked)
    assert chat.reused_tokens >= 192
    fresh = make_prompt_cache(model)
    logits = [
        model(mx.array([tokens]), cache=cache)[0, -1]
        for cache, tokens in ((chat.cache, asked[chat.reused_tokens :]), (fresh, asked))
    ]
    assert mx.abs(logits[0] - logits[1]).max() < 1e-4 * mx.abs(logits[1]).max()


def test_windowed_layers_without_their_pages_start_anew(store, monkeypatch):
    """When pages before the window are gone (test_paged_layers has the real case)."""
    model = tiny_models.model("gemma3")
    chat = session(store, model, "chat", **EXACT, **SMALL)
    told = prompt(300)
    mx.eval(model(mx.array([chat.feed(told)]), cache=chat.cache))
    monkeypatch.setattr(KVCache, "can_trim", lambda self, count: count <= 8)  # noqa: ARG005
    assert chat.feed([*told[:295], 1]) == [1]
    assert chat.feed(told[:100]) == told[:100]
    assert chat.reused_tokens == chat.num_cached == 0
    assert "of 295 tokens the prompt shares 99" in chat.reason
    assert "windowed layer cannot go back 196 tokens" in chat.reason
    fresh = make_prompt_cache(model)
    one, two = (model(mx.array([told[:100]]), cache=cache)[0, -1] for cache in (chat.cache, fresh))
    assert mx.abs(one - two).max() < 1e-4 * mx.abs(two).max()


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_prefix_of_another_session_is_found(processes, store, name):
    model = tiny_models.model(name)
    system = prompt(100)
    with session(store, model, "one", **EXACT, **SMALL) as chat:
        turn(chat, model, system + prompt(50, seed=2), 5)
    asked = system + prompt(30, seed=3)
    with session(processes.open(), model, "two", **EXACT, **SMALL) as chat:
        rest = chat.feed(asked)
        assert chat.reused_tokens == 96  # whole pages of 16
        assert "96 tokens found in the store" in chat.reason
        fresh = make_prompt_cache(model)
        mx.eval(model(mx.array([asked[:96]]), cache=fresh))
        one, two = (model(mx.array([rest]), cache=cache) for cache in (chat.cache, fresh))
        assert mx.abs(one - two).max() < 1e-4 * mx.abs(two).max()
    assert len(chat.tokens) == len(asked)


def test_a_stored_prefix_that_ends_with_the_prompt_leaves_one_token(processes, store):
    model = tiny_models.model("qwen3")
    with session(store, model, "one", **EXACT, **SMALL) as chat:
        turn(chat, model, prompt(200), 1)
    for length, reused in ((160, 144), (161, 160), (17, 16), (16, 0)):
        chat = session(processes.open(), model, f"of-{length}", **EXACT, **SMALL)
        rest = chat.feed(prompt(200)[:length])
        assert (chat.reused_tokens, len(rest)) == (reused, length - reused)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3-next"])
def test_a_lost_pack_means_a_shorter_prefix_or_starting_anew(
    processes, store, name, expected_findings
):
    """Never wrong silently: what is left of a damaged store is used, the rest computed again."""
    model = tiny_models.model(name)
    told: list[int] = []
    packs: list[set[Path]] = []
    for number in range(3):
        with session(store, model, "chat", **EXACT, **SMALL) as chat:
            told = told + prompt(50, seed=number)
            told = told + turn(chat, model, told, 14)
        packs.append({path for path in store.path.rglob("c.*") if path.is_file()})
    for path in packs[2] - packs[1]:
        path.unlink()
    expected_findings |= {"reference"}
    chat = session(processes.open(), model, "chat", **EXACT, **SMALL)
    asked = [*told, 7, 8]
    rest = chat.feed(asked)
    if name == "qwen3-next":
        assert chat.reused_tokens == 0
    else:
        assert 96 <= chat.reused_tokens <= 128
        assert chat.reused_tokens % 16 == 0
    assert "missing" in chat.reason or "found in the store" in chat.reason
    fresh = make_prompt_cache(model)
    if chat.reused_tokens:
        mx.eval(model(mx.array([asked[: chat.reused_tokens]]), cache=fresh))
    one, two = (model(mx.array([rest]), cache=cache)[0, -1] for cache in (chat.cache, fresh))
    assert mx.abs(one - two).max() < 1e-4 * mx.abs(two).max()


def test_saving_costs_what_is_new(store):
    model = tiny_models.model("llama")
    chat = session(store, model, "chat", preset="card", **SMALL)
    turn(chat, model, prompt(400), 1)
    first = chat.save()
    turn(chat, model, [*chat.tokens, *prompt(32, seed=2)], 1)
    second = chat.save()
    assert first.new_pages >= 3 * 20
    assert 0 < second.new_pages <= 3 * 3
    assert second.nbytes_written < first.nbytes_written / 4
    assert second.sequence > first.sequence


def test_leaving_saves_only_what_changed(store):
    model = tiny_models.model("llama")
    with session(store, model, "chat", **SMALL):
        pass
    assert not store.sessions()
    with session(store, model, "chat", **SMALL) as chat:
        turn(chat, model, prompt(40), 2)
    (before,) = store.sessions()
    with session(store, model, "chat", **SMALL) as chat:
        assert chat.tokens
    (after,) = store.sessions()
    assert before == after


@pytest.mark.parametrize("save_on_error", [False, True])
def test_an_exception_leaves_the_previous_checkpoint(processes, store, save_on_error):
    model = tiny_models.model("llama")
    with session(store, model, "chat", **SMALL) as chat:
        turn(chat, model, prompt(40), 3)
    kept = list(chat.tokens)
    more = [*kept, *prompt(40, seed=2)]
    chat = session(store, model, "chat", **SMALL, save_on_error=save_on_error)

    def interrupted():
        with chat:
            mx.eval(model(mx.array([chat.feed(more)]), cache=chat.cache))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    chat = session(processes.open(), model, "chat", **SMALL)
    assert chat.tokens == (more if save_on_error else kept)


def test_tokens_not_told_are_not_guessed(processes, store):
    model = tiny_models.model("llama")
    with session(store, model, "chat", **SMALL) as chat:
        kept = prompt(40) + turn(chat, model, prompt(40), 3)
    chat = session(store, model, "chat", **SMALL)
    greedy(model, chat.cache, chat.feed([*kept, 1]), 5)
    with pytest.raises(InvalidInput, match="holds 49 tokens, only 44 are known"):
        chat.save()
    assert session(processes.open(), model, "chat", **SMALL).tokens == kept
    # the next prompt is compared with what is known, and the unknown rest forgotten
    assert chat.feed([*kept, 1, 2]) == [2]
    assert chat.num_cached == 44


def test_metadata_comes_back(processes, store):
    model = tiny_models.model("llama")
    chat = session(store, model, "chat", **SMALL)
    turn(chat, model, prompt(20), 1)
    chat.save(metadata={"title": "ünicode", "turns": 3})
    again = session(processes.open(), model, "chat", **SMALL)
    assert again.metadata == {"title": "ünicode", "turns": 3}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"keys": "prod3"}, "keys"),
        ({"values": "exact"}, "values"),
        ({"page_tokens": 32}, "page_tokens"),
        ({"seed": 1}, "seed"),
    ],
)
def test_other_codecs_are_named(processes, store, options, field):
    model = tiny_models.model("llama")
    with session(store, model, "chat", **SMALL) as chat:
        turn(chat, model, prompt(40), 3)
    with pytest.raises(Incompatible) as raised:
        session(processes.open(), model, "chat", **{**SMALL, **options})
    assert field in raised.value.field
    assert raised.value.stored != raised.value.given


def test_other_weights_are_named_and_the_session_stays(processes, store):
    model = tiny_models.model("llama")
    with session(store, model, "chat", **SMALL) as chat:
        turn(chat, model, prompt(40), 3)
    other = tiny_models.build("llama", seed=1)
    with pytest.raises(Incompatible) as raised:
        session(processes.open(), other, "chat", **SMALL)
    assert "model" in raised.value.field
    assert str(raised.value.stored) in str(raised.value)
    assert str(raised.value.given) in str(raised.value)
    assert session(processes.open(), model, "chat", **SMALL).tokens == chat.tokens


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_speculative_decoding_in_a_session(processes, name):
    """The draft model's cache is kept as well; tokens are those of plain greedy decoding."""
    model, draft = tiny_models.model(name), tiny_models.build(name, seed=5)
    plain = make_prompt_cache(model)
    told = prompt(60)
    expected = greedy(model, plain, told, 30)
    asked = told + expected + prompt(20, seed=3)
    expected_then = greedy(model, make_prompt_cache(model), asked, 30)
    outs = []
    for tokens in (told, asked):
        with session(processes.open(), model, "chat", draft_model=draft, **EXACT, **SMALL) as chat:
            rest = chat.feed(tokens)
            steps = speculative_generate_step(
                mx.array(rest), model, draft, prompt_cache=chat.cache, max_tokens=30
            )
            outs.append([int(token) for token, _, _ in chat.follow(steps)])
            assert all(line.num_tokens <= len(chat.tokens) for line in chat._lines)
    assert outs == [expected, expected_then]
    assert chat.reused_tokens >= 88  # the last tokens may not have been fed to the draft


@pytest.mark.parametrize("taken", range(1, 9))
def test_speculative_decoding_left_early(processes, store, taken):
    """What was drafted and fed ahead is taken back, wherever the caller stops reading."""
    model, draft = tiny_models.model("qwen3"), tiny_models.model("qwen3")
    expected = greedy(model, make_prompt_cache(model), prompt(40), 30)
    options = {"draft_model": draft, **EXACT, **SMALL}
    with session(store, model, "chat", **options) as chat:
        steps = speculative_generate_step(
            mx.array(chat.feed(prompt(40))),
            model,
            draft,
            prompt_cache=chat.cache,
            max_tokens=30,
            num_draft_tokens=4,
        )
        for count, _ in enumerate(chat.follow(steps), 1):
            if count == taken:
                break
    chat = session(processes.open(), model, "chat", **options)
    assert chat.tokens == (prompt(40) + expected)[: chat.num_cached]
    assert 40 + taken - 1 <= chat.num_cached <= 40 + taken
    rest = chat.feed(prompt(40) + expected[:taken])
    steps = speculative_generate_step(
        mx.array(rest), model, draft, prompt_cache=chat.cache, max_tokens=30 - taken
    )
    assert [int(token) for token, _, _ in steps] == expected[taken:]


def test_draft_models_must_fit_the_lists_mlx_lm_splits(store):
    """gemma3n has fewer caches than layers: mlx-lm would give the draft's to the model."""
    model = tiny_models.model("gemma3n")
    with pytest.raises(InvalidInput, match="makes 2 caches for 4 layers"):
        session(store, model, "chat", draft_model=model, **SMALL)


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{index}": index for index in range(VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1"))


@pytest.mark.parametrize("stop", ["length", "break", "eos"])
def test_stream_generate_followed(processes, store, tokenizer, stop):
    """However generation ends, the tokens told are those in the cache."""
    model = tiny_models.model("qwen3")
    if stop == "eos":
        third = greedy(model, make_prompt_cache(model), prompt(40), 3)[2]
        tokenizer = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[third])
    with session(store, model, "chat", **SMALL) as chat:
        rest = chat.feed(prompt(40))
        responses = stream_generate(model, tokenizer, rest, max_tokens=9, prompt_cache=chat.cache)
        for count, _ in enumerate(chat.follow(responses)):
            if stop == "break" and count == 4:
                break
    assert len(chat.tokens) == chat.num_cached
    assert len(session(processes.open(), model, "chat", **SMALL).tokens) == chat.num_cached


@pytest.mark.parametrize("tokens", [[], [1.5], "text", [[1, 2]], None, [1, None]], ids=repr)
def test_what_is_no_prompt_is_refused(store, tokens):
    model = tiny_models.model("llama")
    chat = session(store, model, "chat", **SMALL)
    with pytest.raises(InvalidInput):
        chat.feed(tokens)
    assert chat.tokens == []


def test_prompts_may_be_arrays(store):
    chat = session(store, tiny_models.model("llama"), "chat", **SMALL)
    assert chat.feed(mx.array([3, 4, 5], dtype=mx.uint32)) == [3, 4, 5]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x" * 200, "a\0b"])
def test_names_that_are_no_names(store, name):
    with pytest.raises(InvalidInput):
        session(store, tiny_models.model("llama"), name, **SMALL)
