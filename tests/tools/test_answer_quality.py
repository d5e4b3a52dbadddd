"""tools/quality without the real model: figures against numpy, whole pages, results, documents."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("mlx_lm")

from mlx_lm.models.cache import KVCache as OwnKVCache

from tests.mlx_lm import tiny_models
from tools import real_model
from tools.answer_quality import __main__ as quality
from tools.answer_quality import figures, forward, report
from tools.answer_quality.needles import DEPTHS, NUMBERS, haystack, padded, share_found
from tools.answer_quality.results import Results, code_digest
from tools.answer_quality.rows import Bits, Row, mlx_row, own_rows, tqstore_row
from tools.answer_quality.texts import Text, texts
from tqstore.presets import PRESETS

VOCABULARY = 40


class Answering:
    """A model of which only the output layer matters: logits are hidden states times a table."""

    def __init__(self) -> None:
        self.model = self
        self.embed_tokens = self
        self.table = mx.random.normal((VOCABULARY, 8), key=mx.random.key(0))

    def as_linear(self, hidden: mx.array) -> mx.array:
        return hidden @ self.table.T


class Words:
    """A tokenizer of one token a word, each of its own."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        words = [self.ids.setdefault(word, len(self.ids) + 3) for word in text.split()]
        return [2, *words] if add_special_tokens else words


def hidden(count: int, seed: int) -> mx.array:
    return mx.random.normal((count, 8), key=mx.random.key(seed))


@pytest.mark.parametrize("count", [1 + figures.CHUNK, 2 * figures.CHUNK, 300])
def test_figures_are_those_of_numpy(count: int) -> None:
    model = Answering()
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, count).tolist()
    dense, packed = hidden(count, 1), hidden(count, 1) + 0.3 * hidden(count, 2)
    found = figures.DenseAnswers(model, dense, tokens).compared_with(packed)
    logits = [
        np.array(h, np.float64) @ np.array(model.table, np.float64).T for h in (dense, packed)
    ]
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in logits)
    assert found.kl == pytest.approx((np.exp(p) * (p - q)).sum(1).mean(), rel=1e-4)
    assert found.top1 == (p.argmax(1) == q.argmax(1)).mean()
    surprise = -q[np.arange(count - 1), tokens[1:]].mean()
    assert found.perplexity == pytest.approx(np.exp(surprise), rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_whole_exact_pages_answer_as_the_models_own_caches(name: str) -> None:
    model = tiny_models.model(name)
    tokens = list(range(1, 33)) * 4
    own = [OwnKVCache() for _ in model.layers]
    expected = forward.hidden_states(model, tokens, own)
    found = forward.hidden_states(model, tokens, forward.whole_pages(model, "exact", "exact"))
    assert mx.allclose(found, expected, atol=1e-5)
    coarse = forward.hidden_states(model, tokens, forward.whole_pages(model, "mse2", "mse2"))
    assert mx.abs(coarse - expected).max().item() > 1e-3


def test_no_token_of_whole_pages_is_exact() -> None:
    model = tiny_models.model("llama")
    cache = forward.whole_pages(model, "mse4", "mse4")
    forward.hidden_states(model, list(range(1, 33)) * 4, cache)
    kv = cache[0]._kv
    assert kv.num_tokens == 128
    assert all(len(layer.tail) == 0 for layer in kv.layers)


def test_the_questions_are_at_the_end_and_answers_are_found_where_they_are() -> None:
    words = Words()
    stack = haystack(words, 300)
    assert len(stack.answers) == len(DEPTHS)
    facts = [words.ids[f"{number}."] for number in NUMBERS]
    for fact, depth in zip(facts, DEPTHS, strict=True):
        assert abs(stack.tokens.index(fact) - depth * 300) < 5 * len(DEPTHS)
    assert len(padded(stack, 64)) % 64 == 0
    assert padded(stack, 64)[: len(stack.tokens)] == stack.tokens
    model = Answering()
    model.table = mx.eye(5100)
    right = np.zeros((len(stack.tokens), 5100), np.float32)
    for at, token in enumerate(stack.tokens[1:]):
        right[at, token] = 1
    assert share_found(model, mx.array(right), stack) == 1
    right[stack.answers[2].start] = 0
    assert share_found(model, mx.array(right), stack) == pytest.approx(1 - 1 / len(DEPTHS))


def test_a_stopped_run_goes_on_and_changed_code_or_text_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    results = Results(path)
    results.put("row", {"package": "tqstore"}, "story", {"kl": 0.5, "version": "text code"})
    again = Results(path)
    assert again.get("row", "story", "text code") == {"kl": 0.5, "version": "text code"}
    assert again.get("row", "story", "text other") is None
    assert again.get("row", "code", "text code") is None
    assert again.get("other", "story", "text code") is None
    again.keep_only(["nothing"])
    assert json.loads(path.read_text())["rows"] == {}
    assert len(code_digest()) == 16


def measurement(results: Results, monkeypatch: pytest.MonkeyPatch) -> quality.Measurement:
    monkeypatch.setattr(quality.real_model, "load", lambda: (Answering(), Words()))
    monkeypatch.setattr(
        quality.forward, "hidden_states", lambda _m, tokens, _c: hidden(len(tokens), 1)
    )
    return quality.Measurement(results, lambda *_: None)


def test_rows_are_measured_once_and_one_that_cannot_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def run(_model: Any, tokens: Any) -> mx.array:
        calls.append("run")
        return hidden(len(tokens), 2)

    def fail(_model: Any, _tokens: Any) -> mx.array:
        raise quality.PeerUnavailable("no such device")

    rows = [
        Row("ours", "tqstore", lambda _: Bits(4.5, 4.1), run),
        Row("theirs", "other", lambda _: Bits(4, 4), fail),
    ]
    text = Text("story", list(range(VOCABULARY)))
    for _ in range(2):
        results = Results(tmp_path / "figures.json")
        measurement(results, monkeypatch).measure_text(text, rows)
    assert calls == ["run"]
    assert results.rows["dense"]["story"]["kl"] == pytest.approx(0, abs=1e-6)
    assert results.rows["ours"]["story"]["kl"] > 0.01
    assert results.rows["ours"]["key_bits"] == 4.5
    assert "no such device" in results.rows["theirs"]["story"]["error"]
    measurement(results, monkeypatch).measure_text(replace(text, tokens=text.tokens[::-1]), rows)
    assert calls == ["run", "run"]


ENTRY = {"package": "tqstore", "note": "", "key_bits": 4.5, "value_bits": 4.1}
FIGURES = {"kl": 0.0123, "top1": 0.9, "perplexity": 20.0}


def test_tables_hold_every_figure_and_say_what_is_missing() -> None:
    whole = ENTRY | dict.fromkeys(report.TEXTS, FIGURES) | {"needles 512": {"found": 0.5}}
    broken = ENTRY | {text: {"error": "does not run here"} for text in report.TEXTS}
    dense = dict.fromkeys(report.TEXTS, 19.0)
    table = "\n".join(report.quality_table({"good": whole, "bad": broken, "new": ENTRY}, dense))
    for told in (
        "good",
        "0.0123",
        "4.50, 4.10",
        "0.900",
        "20.00",
        "does not run here",
        "not measured",
    ):
        assert told in table
    assert "0.50" in report.needle_table({"good": whole}, [512])[-1]


def test_presets_are_compared_with_affine_caches() -> None:
    def of(kl: float, **more: str) -> dict[str, Any]:
        return ENTRY | dict.fromkeys(report.TEXTS, FIGURES | {"kl": kl}) | more

    rows = {
        "QuantizedKVCache 4 bits": of(0.2),
        "a / b": of(0.01, note="preset `balanced`"),
        "c / d": of(0.01),
        "exact / exact": of(0.0, note="preset `exact`"),
    }
    lines = report.summary(rows)
    assert len(lines) == 1
    assert "`balanced`" in lines[0]
    assert lines[0].count("0.05 (") == len(report.TEXTS)


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{report.BEGIN}old\n{report.END}after\n")
    for _ in range(2):
        report.write_document(["| new |"], document)
        assert document.read_text() == f"before\n{report.BEGIN}| new |\n{report.END}after\n"
    document.write_text("nothing\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        report.write_document(["| new |"], document)


def test_the_plot_is_the_same_file_for_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = ENTRY | dict.fromkeys(report.TEXTS, FIGURES)
    paths = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in paths:
        report.write_plot({"good": whole}, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"good" in paths[0].read_bytes() or b"<path" in paths[0].read_bytes()


def test_every_preset_is_a_row() -> None:
    rows = own_rows()
    assert len({row.name for row in rows}) == len(rows)
    assert sum(row.note.startswith("preset") for row in rows) == 5


def test_the_documents_have_their_markers() -> None:
    for document in (report.DOCUMENT, report.CHOICES_DOCUMENT):
        text = document.read_text()
        assert report.BEGIN in text
        assert report.END in text


def test_tables_of_nothing_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert quality.main(["--tables", "--no-peers", "--json", str(path)]) == 1
    assert "nothing was measured" in capsys.readouterr().out
    Results(path).put("dense", {"package": "", "note": ""}, "story", FIGURES)
    results = Results(path)
    results.put_choices("story", "v", {"mean": {"mean": 0.25, "largest": 0.5}})
    assert quality.main(["--tables", "--no-peers", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "20.00" in out
    assert "0.2500, 0.5000" in out


@pytest.mark.real_model
@pytest.mark.xdist_group("real_model")
@pytest.mark.skipif(not real_model.is_available(), reason="the `model` extra is not installed")
def test_balanced_is_seven_times_closer_to_the_dense_cache_than_affine_four_bits() -> None:
    """An eighth of the story; docs/quality.md has the whole, and more."""
    model, tokenizer = real_model.load()
    tokens = texts(tokenizer)[0].tokens[:128]
    dense = forward.hidden_states(model, tokens, None)
    answers = figures.DenseAnswers(model, dense, tokens)
    ours = tqstore_row(PRESETS["balanced"].keys, PRESETS["balanced"].values)
    theirs = mlx_row(4)
    kl = [answers.compared_with(row.run(model, tokens)).kl for row in (ours, theirs)]
    assert kl[0] <= kl[1] / 7
    for own, other in zip(astuple(ours.bits(model)), astuple(theirs.bits(model)), strict=True):
        assert own <= other
