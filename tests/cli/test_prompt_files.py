"""`tqstore import` and `tqstore export`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import load_prompt_cache

import tqstore
from tests.cli.conftest import Run, the_error
from tests.cli.test_frame import MAIN, python
from tests.mlx_lm import tiny_models
from tests.mlx_lm.test_prompt_files import DATA, MODEL, TOLD
from tqstore.mlx_lm import fingerprint, session

FULL = DATA / "0.28.0-full.safetensors"
EXACT = ("--preset", "exact", "--page-tokens", "4")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOLD))
    return path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A folder that mlx-lm loads a tiny model from."""
    model = tiny_models.model("qwen3")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(asdict(model.args)))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def test_an_old_file_goes_in_and_a_new_one_comes_out(
    run: Run, tmp_path: Path, store_dir: Path, tokens: Path
) -> None:
    given = ("import", FULL, "chat", "--tokens", tokens, "--model", MODEL, *EXACT)
    ran = run(*given, "--store", store_dir)
    assert (ran.code, ran.err) == (0, "")
    assert "mlx-lm before 0.32" in ran.out
    assert "2 paged (exact/exact)" in ran.out
    assert "21" in ran.out
    out = tmp_path / "new.safetensors"
    ran = run("export", "chat", out, "--store", store_dir)
    assert (ran.code, ran.err) == (0, "")
    one, _ = load_prompt_cache(str(out))
    assert one.offset == len(TOLD)
    # and what was exported needs no options
    told = run("import", out, "again", *EXACT, "--json", "--store", store_dir).json
    assert (told["num_tokens"], told["new_pages"], told["losses"]) == (21, 0, [])
    told = run("export", "again", out, "--force", "--json", "--store", store_dir).json
    assert told["path"] == str(out)
    assert told["nbytes"] == out.stat().st_size


def test_losses_are_said(run: Run, store_dir: Path, tokens: Path) -> None:
    file = DATA / "0.31.3-quantized.safetensors"
    ran = run("import", file, "chat", "--tokens", tokens, "--model", MODEL, "--store", store_dir)
    assert ran.code == 0
    assert "quantized to 8 bits" in ran.out


def test_with_a_models_folder(run: Run, tmp_path: Path, store_dir: Path, model_dir: Path) -> None:
    model = tiny_models.model("qwen3")
    with tqstore.Store.open(store_dir) as store, session(store, model, "chat") as chat:
        rest = chat.feed(tiny_models.prompt(120))
        chat.extend(tiny_models.greedy(model, chat.cache, rest, 10))
    out = tmp_path / "out.safetensors"
    assert run("export", "chat", out, "--model", model_dir, "--store", store_dir).code == 0
    ran = run("import", out, "two", "--model", model_dir, "--store", store_dir)
    assert (ran.code, ran.err) == (0, "")
    with tqstore.Store.open(store_dir) as store:
        assert store.resume("two", model=fingerprint(model)).num_tokens == len(chat.tokens)


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["import", FULL, "chat", "--model", MODEL], 13, "--tokens FILE"),
        (["import", FULL, "chat", "--tokens", "TOKENS"], 13, "--model"),
        (["import", "none.safetensors", "chat", "--model", MODEL], 11, "none.safetensors"),
        (["import", FULL, "chat", "--tokens", "none", "--model", MODEL], 11, "no file none"),
        (["import", FULL, "a/b", "--tokens", "TOKENS", "--model", MODEL], 13, "cannot name"),
        (["export", "nobody", "out.safetensors"], 11, "nobody"),
        (["export", "nobody", "/"], 13, "/ is a folder. Name the file to make in it"),
    ],
)
def test_errors(
    run: Run, store_dir: Path, tokens: Path, given: list[object], code: int, said: str
) -> None:
    tqstore.Store.open(store_dir).close()
    arguments = [tokens if item == "TOKENS" else item for item in given]
    ran = run(*arguments, "--store", store_dir)
    assert ran.code == code
    assert said in the_error(ran)


def test_a_model_that_is_none(run: Run, store_dir: Path, tmp_path: Path, tokens: Path) -> None:
    given = ("import", FULL, "chat", "--tokens", tokens, "--store", store_dir)
    assert run(*given, "--model", "no/where").code == 2
    ran = run(*given, "--model", tmp_path)
    assert ran.code == 13
    assert "no model can be loaded" in the_error(ran)


def test_a_file_that_is_there_stays(run: Run, tmp_path: Path, chats: Path) -> None:
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"mine")
    ran = run("export", "fork", path, "--store", chats)
    assert ran.code == 12
    assert "--force" in the_error(ran)
    assert path.read_bytes() == b"mine"
    ran = run("export", "chat one", path, "--force", "--store", chats)
    assert ran.code == 13  # it has a state of its own
    assert "--model" in the_error(ran)
    assert path.read_bytes() == b"mine"


def test_a_session_that_is_there_stays(run: Run, chats: Path, tokens: Path) -> None:
    given = ("import", FULL, "fork", "--tokens", tokens, "--model", MODEL, "--store", chats)
    ran = run(*given)
    assert ran.code == 12
    assert "fork" in the_error(ran)


@pytest.mark.parametrize("command", ["import", "export"])
def test_without_mlx_lm_it_says_what_to_install(command: str) -> None:
    program = f"import sys; sys.modules['mlx_lm'] = None; {MAIN}"
    ran = python(program, command, "a", "b")
    assert ran.code == 2
    assert "pip install '.[mlx-lm]'" in the_error(ran)
