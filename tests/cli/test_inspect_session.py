"""`tqstore inspect SESSION`: its state, and one page of it against the bytes on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import METADATA, MODEL, SPEC, Run, flip, packs_of, the_error
from tqstore.format.page import stream_arrays
from tqstore.store.page_store import PageStore


def test_json_of_a_session(chats: Path, run: Run) -> None:
    told = run("inspect", "chat one", "--store", chats, "--json").json
    assert (told["tokens"], told["blocks"], told["tail_tokens"]) == (340, 20, 20)
    assert (told["page_tokens"], told["recent_tokens"]) == (16, 8)
    assert len(set(told["block_hashes"])) == 20
    assert [each["num_tokens"] for each in told["checkpoints"]] == [340, 300]
    assert told["namespace"]["model"] == {"fingerprint": MODEL, "parts": {"weights": "12" * 8}}
    assert told["states"][0]["arrays"] == [{"dtype": "float32", "shape": [1, 3, 4], "nbytes": 48}]
    assert told["states"][0]["meta"] == {"offset": 1}
    assert told["metadata"]["limit"] == "inf"
    layers = told["layers"]
    assert [each["layers"] for each in layers] == [[0], [1], [2]]
    assert [each["window"] for each in layers] == [None, 100, None]
    assert [each["pages_needed"] for each in layers] == [20, 9, 20]  # ceil(100/16) + 1, one sink
    assert [each["pages_missing"] for each in layers] == [0, 0, 0]
    assert [each["page_spec"] for each in layers] == [spec.fields for spec in SPEC.page_specs]
    assert sum(each["pages_used"] for each in told["packs"]) == 49
    assert {each["path"] for each in told["packs"]} <= {
        str(file.relative_to(chats)) for file in packs_of(chats)
    }


def test_the_tables_say_it_to_people(chats: Path, run: Run) -> None:
    ran = run("inspect", "chat one", "--store", chats)
    assert ran.code == 0
    for told in ("340: 20 blocks of 16 and 20 in the tail", MODEL, "model.weights", "prod4",
                 "100, 4 sinks", "000000000002.ckpt", "ArraysCache", "float32 1x3x4"):  # fmt: skip
        assert told in ran.out
    assert str(METADATA["title"]) not in ran.out  # the terminal is not steered by a file
    assert r"\u001b[31m" in ran.out


def test_a_page_is_shown_as_the_store_reads_it(chats: Path, run: Run) -> None:
    told = run("inspect", "fork", "--page", 7, "--layer", 2, "--store", chats, "--json").json
    spec = SPEC.page_specs[2]
    with PageStore.open(chats, mode="r") as store:
        checkpoint = store.latest("fork")
        ns = store.namespace(store.stored_namespace(checkpoint.namespace_id))
        name = checkpoint.block_hashes[7]
        place = ns.locate(spec, 2, name)
        assert place is not None
        record = np.zeros((1, spec.page_nbytes), np.uint8)
        ns.read_pages(spec, [place], record)
    assert told["header"]["block_hash"] == name.hex()
    assert told["parent"] == checkpoint.block_hashes[6].hex()
    assert told["tokens"] == list(range(-5 + 7 * 16, -5 + 8 * 16))
    assert (told["page"], told["num_pages"], told["slot"]) == (7, 23, place.slot)
    assert (chats / told["pack"]).is_file()
    arrays = stream_arrays(record[0], spec)
    for stream in told["streams"]:
        array = arrays[stream["name"]]
        assert stream["shape"] == list(array.shape)
        assert stream["nbytes"] == array.nbytes
    by_name = {stream["name"]: stream for stream in told["streams"]}
    assert by_name["value_scales"]["max"] == float(arrays["value_scales"].max())
    assert sum(by_name["value_codes"]["histogram"]) == 2 * 16 * 64
    floats = (arrays["key_exact"].astype(np.uint32) << 16).view(np.float32)
    assert by_name["key_exact"]["std"] == pytest.approx(float(floats.astype(float).std()))


def test_a_page_is_drawn(chats: Path, run: Run) -> None:
    ran = run("inspect", "chat one", "-p", 0, "--store", chats)
    assert ran.code == 0
    for told in ("page      0 of 0-19", "layer     0 of 0-2", "the first block", "16: -5 -4 -3",
                 "3-bit codes", "key_residual_norms", "value_scales", "█", "good"):  # fmt: skip
        assert told in ran.out


def test_a_stream_is_drawn_large(chats: Path, run: Run) -> None:
    ran = run("inspect", "chat one", "-p", 0, "--stream", "key_codes", "--store", chats)
    rows = [line for line in ran.out.splitlines() if "%" in line and "█" in line][-8:]
    assert [row.split()[0] for row in rows] == list("01234567")
    assert sum(int(row.split()[1].replace(",", "")) for row in rows) == 2 * 16 * 64
    assert "value_codes" not in ran.out


def test_plain_terminals_get_plain_bars(
    chats: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqstore.cli.page_view.is_unicode", lambda _out: False)
    ran = run("inspect", "chat one", "-p", 0, "--stream", "key_codes", "--store", chats)
    assert "###" in ran.out
    assert "█" not in ran.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nobody"], 11, "no session 'nobody'"),
        ([".hidden"], 13, "cannot name a session"),
        (["a\tb"], 13, "cannot name a session"),
        (["x" * 129], 13, "cannot name a session"),
        (["../fork"], 11, "never holds a '/'"),
        (["fork/"], 11, "never holds a '/'"),
        (["fork", "-p", 23], 11, "Its pages are 0 to 22; tokens from 368 on are in the tail"),
        (["fork", "-p", 10**30], 11, "Its pages are 0 to 22"),
        (["fork", "-p", 0, "-l", 3], 11, "Layers are 0 to 2"),
        (["fork", "-p", 0, "-l", 1, "--stream", "moon"], 11, "It has key_codes, key_signs"),
        (["small", "-p", 0], 11, "no pages yet: all 0 tokens are in the tail"),
    ],
)
def test_what_is_not_there(
    chats: Path, run: Run, arguments: list[object], code: int, said: str
) -> None:
    ran = run("inspect", *arguments, "--store", chats)
    assert ran.code == code
    assert said in the_error(ran)
    assert ran.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["fork", "--layer", 1],
        ["fork", "--stream", "key_codes"],
        ["fork", "-p", -1],
        ["fork", "-p", "x"],
        [],
    ],
)
def test_wrong_usage(chats: Path, run: Run, arguments: list[object]) -> None:
    ran = run("inspect", *arguments, "--store", chats)
    assert ran.code == 2
    assert "Usage" in ran.err


def test_a_flipped_page_is_refused(chats: Path, run: Run, expected_findings: set[str]) -> None:
    expected_findings |= {"page", "reference"}
    told = run("inspect", "fork", "-p", 3, "--store", chats, "--json").json
    pack = chats / told["pack"]
    contents = run("inspect", pack, "--json").json
    flip(pack, contents["first_slot"] + told["slot"] * contents["stride"] + 1000)
    ran = run("inspect", "fork", "-p", 3, "--store", chats)
    assert ran.code == 15
    assert "bad checksum" in the_error(ran)
    assert ran.out == ""


def test_missing_pages_are_told(chats: Path, run: Run, expected_findings: set[str]) -> None:
    expected_findings.add("reference")
    for pack in packs_of(chats):
        pack.unlink()
    ran = run("inspect", "chat one", "--store", chats)
    assert ran.code == 11
    assert "49 pages that session 'chat one' needs are not in the store" in the_error(ran)
    assert "340: 20 blocks" in ran.out
    ran = run("inspect", "chat one", "-p", 0, "--store", chats)
    assert ran.code == 11
    assert "is not in the store" in the_error(ran)


def test_the_checkpoint_before_is_shown_if_the_newest_is_damaged(
    chats: Path, run: Run, expected_findings: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected_findings.add("checkpoint")
    flip(max(chats.glob("sessions/chat-one-*/*.ckpt")), 60)
    told = run("inspect", "chat one", "--store", chats, "--json").json
    assert told["tokens"] == 300
    assert [each["problem"] is None for each in told["checkpoints"]] == [False, True]
    assert "trying the one before" in caplog.text
    flip(min(chats.glob("sessions/chat-one-*/*.ckpt")), 60)
    caplog.clear()
    ran = run("inspect", "chat one", "--store", chats)
    assert ran.code == 15
    ends = [record.getMessage().rpartition("; ")[2] for record in caplog.records]
    assert ends == ["trying the one before", "there is none before"]
    assert "checksum" in ran.err
