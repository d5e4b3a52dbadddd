"""What the README says is so: its commands and links exist, and its example runs."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

import tqstore
from tools import real_model

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_into_the_project_leads_somewhere(target: str) -> None:
    if not target.startswith("https://"):
        assert (ROOT / target).exists()


def test_every_command_can_be_run() -> None:
    commands = [line.split()[0] for block in code_blocks("sh") for line in block.splitlines()]
    assert {"tools/demo", "tools/test"} <= set(commands)
    for command in commands:
        if command.startswith("tools/"):
            assert os.access(ROOT / command, os.X_OK), command


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.xdist_group("real_model")
@pytest.mark.skipif(not real_model.is_available(), reason="the `model` extra is not installed")
def test_the_example_runs_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlx_lm

    loaded = real_model.load()
    monkeypatch.setenv("TQSTORE_HOME", str(tmp_path / "store"))
    short = functools.partial(mlx_lm.stream_generate, max_tokens=8)
    monkeypatch.setattr(mlx_lm, "stream_generate", short)
    monkeypatch.setattr(mlx_lm, "load", lambda _path: loaded)
    (example,) = code_blocks("python")
    document = topics["execmodel"][:2_000]
    reused = []
    for question in ("\n\nQuestion: What is a block?", "\n\nQuestion: What is a scope?"):
        example = example.replace("path/to/any/mlx-lm/model", str(real_model.model_folder()))
        names: dict[str, Any] = {"document": document, "question": question}
        exec(compile(example, "README.md", "exec"), names)
        assert capsys.readouterr().out
        reused.append(names["chat"].reused_tokens)
        names["store"].close()
    assert reused[0] == 0
    assert reused[1] > len(loaded[1].encode(document))
    with tqstore.Store.open() as store:
        assert [info.name for info in store.sessions()] == ["report"]
