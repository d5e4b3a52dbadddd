"""`tqstore inspect PACK`: by path or from the store, whole or damaged in every region."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, flip, packs_of, the_error
from tqstore.format.framing import crc32c


@pytest.fixture
def pack(chats: Path) -> Path:
    """The largest of the layers that are not exact."""
    found = (file for file in packs_of(chats) if "prod4" in str(file))
    return max(found, key=lambda file: file.stat().st_size)


def contents(run: Run, pack: Path) -> Any:
    return run("inspect", pack, "--json").json


def test_json_of_a_pack(run: Run, pack: Path) -> None:
    told = contents(run, pack)
    assert told["nbytes"] == pack.stat().st_size
    assert told["faults"] == []
    assert [each["slot"] for each in told["pages"]] == list(range(36))
    assert {each["layer"] for each in told["pages"]} == {0, 1}
    assert all(each["fault"] is None for each in told["pages"])
    assert told["blocks"][0]["tokens"] == list(range(-5, 11))
    assert told["blocks"][0]["parent"] is None
    assert told["blocks"][3]["parent"] == told["blocks"][2]["hash"]
    # Zarr's own index is where the pages are.
    raw = pack.read_bytes()
    offset, nbytes = struct.unpack_from("<QQ", raw, len(raw) - 4 - 16 * told["max_pages"])
    assert offset == told["first_slot"]
    assert nbytes == told["page_nbytes"] + 4


def test_the_tables_say_it_to_people(run: Run, pack: Path) -> None:
    ran = run("inspect", pack)
    assert ran.code == 0
    for told in (
        "36 of 36 pages good",
        "as its header says",
        "-5 -4 -3 -2 -1 0 1 2 ...",
        "padding",
    ):
        assert told in ran.out


def test_a_pack_is_found_from_the_store_and_from_here(
    chats: Path, run: Run, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run("inspect", pack).out
    assert run("inspect", pack.relative_to(chats), "--store", chats).out == expected
    assert run("--store", chats, "inspect", pack.relative_to(chats)).out == expected
    monkeypatch.chdir(pack.parent)
    assert run("inspect", f"./{pack.name}").out == expected
    assert run("inspect", f"./{pack.name}", "--store", "/nowhere").out == expected


def test_a_slot_is_the_page_the_session_shows(chats: Path, run: Run) -> None:
    page = run("inspect", "fork", "-p", 20, "-l", 1, "--store", chats, "--json").json
    slot = run("inspect", chats / page["pack"], "-p", page["slot"], "--json").json
    for field in ("header", "tokens", "parent", "streams", "page_spec"):
        assert slot[field] == page[field]
    assert slot["fault"] is None
    streams = {one["name"]: one for one in slot["streams"]}
    held = 8 * sum(one["nbytes"] for name, one in streams.items() if name.startswith("key_"))
    assert held <= slot["key_bits"] * 2 * 16 * 64 < held + 8 * 64 * len(streams)


def test_a_pack_needs_only_its_folder(run: Run, pack: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(pack.parent, copied)
    assert contents(run, copied / pack.name)["blocks"] == contents(run, pack)["blocks"]
    (copied / "zarr.json").unlink()
    ran = run("inspect", copied / pack.name)
    assert ran.code == 11
    assert "zarr.json is missing" in the_error(ran)


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("ns/none/c.1.0", 11, "there is no pack 'ns/none/c.1.0'"),
        ("./FORMAT", 13, "is no pack"),
        ("sessions/", 11, "there is no pack"),
        ("/dev/null/c.1.0", 11, "there is no pack"),
        ("a/" * 3000, 19, "name too long"),
        ("a/\x00", 11, "there is no pack"),
    ],
)
def test_what_is_no_pack(chats: Path, run: Run, target: str, code: int, said: str) -> None:
    ran = run("inspect", target, "--store", chats)
    assert ran.code == code
    assert said.lower() in the_error(ran).lower()


def test_a_slot_that_is_not_there(run: Run, pack: Path) -> None:
    ran = run("inspect", pack, "-p", 36)
    assert ran.code == 11
    assert "Its pages are 0 to 35" in the_error(ran)
    assert run("inspect", pack, "-p", 0, "-l", 0).code == 2


@pytest.mark.parametrize("region", ["magic", "version", "length", "body"])
def test_a_damaged_header_is_refused(
    run: Run, pack: Path, region: str, expected_findings: set[str]
) -> None:
    expected_findings |= {"pack", "reference"}
    flip(pack, {"magic": 0, "version": 4, "length": 8, "body": 200}[region])
    for page in ([], ["-p", 0]):
        ran = run("inspect", pack, *page)
        assert ran.code == 15
        assert ran.out == ""
        the_error(ran)


def test_a_newer_format_is_left_alone(run: Run, pack: Path, expected_findings: set[str]) -> None:
    expected_findings |= {"pack", "reference"}
    raw = bytearray(pack.read_bytes())
    raw[4:6] = (2).to_bytes(2, "little")
    raw[20:24] = crc32c(bytes(raw[:20])).to_bytes(4, "little")
    pack.write_bytes(raw)
    ran = run("inspect", pack)
    assert ran.code == 14
    assert "stored 2, given 1" in the_error(ran)
    assert "newer tqstore" in ran.err


def test_a_damaged_page_is_shown_and_told(
    run: Run, pack: Path, expected_findings: set[str]
) -> None:
    expected_findings |= {"page", "reference"}
    whole = contents(run, pack)
    flip(pack, whole["first_slot"] + 4 * whole["stride"] + 500)
    ran = run("inspect", pack)
    assert ran.code == 15
    assert "1 of 36 pages is damaged" in the_error(ran)
    assert "35 of 36 pages good" in ran.out
    told = json.loads(run("inspect", pack, "--json").out)
    assert [each["slot"] for each in told["pages"] if each["fault"]] == [4]
    ran = run("inspect", pack, "-p", 4)
    assert ran.code == 15
    assert "bad checksum" in the_error(ran)
    assert "key_codes" in ran.out
    assert run("inspect", pack, "-p", 5).code == 0


@pytest.mark.parametrize("offset", [0, 9, 20])
def test_a_page_with_a_damaged_header_is_shown_and_told(
    run: Run, pack: Path, offset: int, expected_findings: set[str]
) -> None:
    expected_findings |= {"page", "reference"}
    whole = contents(run, pack)
    flip(pack, whole["first_slot"] + 2 * whole["stride"] + offset)
    ran = run("inspect", pack, "-p", 2)
    assert ran.code == 15
    assert "page 2: bad checksum" in the_error(ran)
    assert "value_scales" in ran.out


def test_a_damaged_index_is_told(run: Run, pack: Path, expected_findings: set[str]) -> None:
    expected_findings.add("index")
    flip(pack, pack.stat().st_size - 100)
    ran = run("inspect", pack)
    assert ran.code == 15
    assert "zarr's index" in the_error(ran)
    assert run("inspect", pack, "-p", 0).code == 0


def test_a_pack_cut_short_is_refused_at_every_length(
    run: Run, pack: Path, expected_findings: set[str]
) -> None:
    expected_findings |= {"pack", "reference"}
    raw, whole = pack.read_bytes(), contents(run, pack)
    in_page_2 = whole["first_slot"] + 2 * whole["stride"] + 100
    for length in (0, 10, 23, 24, 500, whole["header_nbytes"], in_page_2, len(raw) - 1):
        pack.write_bytes(raw[:length])
        ran = run("inspect", pack)
        assert ran.code == 15
        assert str(pack) in the_error(ran)
        assert run("inspect", pack, "-p", 2).code == (15 if length <= in_page_2 else 0)
    pack.write_bytes(raw[:in_page_2])
    assert run("inspect", pack, "-p", 1).code == 0


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"attributes": {"tqstore": {"page_spec": 5}}}', "[" * 100_000,
     '{"attributes": {"tqstore": {"page_spec": {"keys": "prod4", "values": "int8"}}}}',
     ('{"attributes": {"tqstore": {"page_spec": {"keys": "prod4", "values": "int8", "kv_heads": [],'
      '"key_dim": 64, "value_dim": 64, "page_tokens": 16, "dtype": "float16"}}}}')],
)  # fmt: skip
def test_a_hostile_zarr_json_is_refused(
    run: Run, pack: Path, text: str, expected_findings: set[str]
) -> None:
    expected_findings.add("zarr")
    (pack.parent / "zarr.json").write_text(text)
    ran = run("inspect", pack)
    assert ran.code == 15
    assert "zarr.json" in the_error(ran)


def test_a_link_in_a_packs_place_is_not_followed(
    run: Run, pack: Path, tmp_path: Path, expected_findings: set[str]
) -> None:
    expected_findings |= {"link", "pack", "reference"}
    pack.rename(tmp_path / pack.name)
    pack.symlink_to(tmp_path / pack.name)
    ran = run("inspect", pack)
    assert ran.code == 15
    assert "symbolic link" in the_error(ran)
