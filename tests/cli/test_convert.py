"""`tqstore convert`: other codecs, what it lost, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import tqstore
from tests.cli.conftest import Run, the_error
from tests.cli.test_frame import MAIN, python


def test_a_session_is_converted_in_place(run: Run, chats: Path) -> None:
    ran = run("convert", "chat one", "--keys", "int8", "--store", chats)
    assert (ran.code, ran.err) == (0, "")
    assert "prod4" in ran.out
    assert "copied" in ran.out
    assert "on top of what prod4 had lost before" in ran.out
    assert "checkpoint 3" in ran.out
    with tqstore.Store.open(chats, mode="r") as store:
        resumed = store.resume("chat one")
        assert {str(page.keys) for page in resumed.cache.spec.page_specs} == {"int8"}
        assert [str(page.values) for page in resumed.cache.spec.page_specs] == [
            "int8",
            "int8",
            "uni4",
        ]
        assert resumed.num_tokens == 340
        assert resumed.metadata["raw"] == b"\x01\x02"


def test_json_tells_everything(run: Run, chats: Path) -> None:
    told = run(
        "convert", "fork", "--preset", "exact", "--to", "whole", "--json", "--store", chats
    ).json
    assert (told["source"], told["session"], told["sequence"]) == ("fork", "whole", 1)
    assert told["keys"]["was_lossy"] is True
    assert told["keys"]["relative_errors"][2] is None  # was exact already
    assert told["keys"]["codecs"][0] == ["prod4", "exact"]
    assert told["nbytes_after"] > told["nbytes_before"] > 0
    assert told["num_tokens"] == 390
    assert any("stays lost" in line or "on top" in line for line in told["losses"])


def test_an_option_goes_before_the_preset(run: Run, chats: Path) -> None:
    told = run(
        "convert", "fork", "--preset", "exact", "--keys", "mse2", "--json", "--store", chats
    ).json
    assert {new for _, new in told["keys"]["codecs"]} == {"mse2"}
    assert {new for _, new in told["values"]["codecs"]} == {"exact"}


def test_a_session_without_pages_loses_nothing(run: Run, chats: Path) -> None:
    ran = run("convert", "small", "--preset", "small", "--store", chats)
    assert ran.code == 0
    assert "nothing was in pages yet" in ran.out


@pytest.mark.parametrize("given", [[], ["--preset", "best"]])
def test_wrong_usage(run: Run, chats: Path, given: list[str]) -> None:
    ran = run("convert", "fork", *given, "--store", chats)
    assert ran.code == 2
    assert "--preset" in ran.err


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["fork", "--keys", "nothing"], 13, "unknown codec"),
        (["nobody", "--keys", "int8"], 11, "nobody"),
        (["fork", "--keys", "int8", "--to", "small"], 12, "small"),
    ],
)
def test_errors(run: Run, chats: Path, given: list[str], code: int, said: str) -> None:
    ran = run("convert", *given, "--store", chats)
    assert ran.code == code
    assert said in the_error(ran)


def test_no_store_is_made(run: Run, tmp_path: Path) -> None:
    ran = run("convert", "chat", "--keys", "int8", "--store", tmp_path / "none")
    assert ran.code == 11
    assert not (tmp_path / "none").exists()


def test_without_mlx_it_says_what_to_install(chats: Path) -> None:
    program = f"import sys; sys.modules['mlx'] = None; {MAIN}"
    ran = python(program, "convert", "fork", "--keys", "int8", "--store", chats)
    assert ran.code == 2
    assert "needs mlx" in the_error(ran)
