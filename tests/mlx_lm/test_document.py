"""The Python of docs/mlx-lm.md runs as it stands, one block after the other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

import tqstore
from tests.mlx_lm.tiny_models import VOCAB, build
from tqstore.mlx_lm import session

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "mlx-lm.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Letters:
    """A tokenizer: a token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(64 + token) for token in tokens)


def stream_generate(
    model: Any, tokenizer: Letters, prompt: list[int], prompt_cache: list[Any]
) -> Iterator[SimpleNamespace]:
    steps = generate_step(mx.array(prompt), model, prompt_cache=prompt_cache, max_tokens=9)
    for token, _ in steps:
        yield SimpleNamespace(token=int(token), text=tokenizer.decode([int(token)]))


def test_its_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQSTORE_HOME", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "path" / "of" / "a" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(mlx_lm, "load", lambda _folder: (build("llama"), Letters()))
    monkeypatch.setattr(mlx_lm, "stream_generate", stream_generate)
    names: dict[str, Any] = {}
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        exec(compile(block, "docs/mlx-lm.md", "exec"), names)
        assert capsys.readouterr().out
    names["store"].close()
    with tqstore.Store.open() as store:
        assert sorted(info.name for info in store.sessions()) == ["chat", "copy"]


def test_every_option_of_a_session_is_listed() -> None:
    (table,) = re.findall(r"^\| option of `session` .*?\n\n", TEXT, re.MULTILINE | re.DOTALL)
    listed = dict(re.findall(r"`(\w+)=([^`]+)`", table))
    options = inspect.signature(session).parameters.values()
    assert {name: eval(default) for name, default in listed.items()} == {
        option.name: option.default for option in options if option.kind is option.KEYWORD_ONLY
    }
