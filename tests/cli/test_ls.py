"""`tqstore ls`: what it counts, and what it says of empty, absent and damaged stores."""

from __future__ import annotations

from pathlib import Path

import pytest

import tqstore
from tests.cli.conftest import MODEL, SINKS, SPEC, WINDOW, Run, flip, packs_of, the_error
from tqstore.format.pack import PackLayout
from tqstore.store.page_store import PageStore


def needed_pages(path: Path, name: str) -> set[tuple[int, bytes]]:
    """(layer, block) of the pages a session needs, straight from the windows' definition."""
    with PageStore.open(path, mode="r") as store:
        checkpoint = store.latest(name)
    needed = set()
    for layer, tail in enumerate(checkpoint.layers):
        for index, block in enumerate(checkpoint.block_hashes):
            first, end = index * 16, (index + 1) * 16
            # One block more than the window touches is kept, so that trimming back stays possible.
            in_window = tail.window is None or end > tail.start - -(-WINDOW // 16) * 16 - 16
            if in_window or first < SINKS:
                needed.add((layer, block))
    return needed


def test_json_counts_tokens_blocks_and_shares(chats: Path, run: Run) -> None:
    listed = {each["name"]: each for each in run("ls", "--store", chats, "--json").json["sessions"]}
    assert list(listed) == ["small", "fork", "chat one"]  # newest first
    stride = [PackLayout.of(spec).stride for spec in SPEC.page_specs]
    pages = {name: needed_pages(chats, name) for name in ("chat one", "fork")}
    shared = pages["chat one"] & pages["fork"]
    assert shared
    for name, tokens in (("chat one", 340), ("fork", 390)):
        session = listed[name]
        newest = max(chats.glob(f"sessions/{name.replace(' ', '-')}*/*.ckpt"))
        own = sum(stride[layer] for layer, _ in pages[name] - shared) + newest.stat().st_size
        assert session["tokens"] == tokens
        assert session["blocks"] == (tokens - 8) // 16
        assert session["shared_nbytes"] == sum(stride[layer] for layer, _ in shared)
        assert session["own_nbytes"] == own
        assert session["model"] == MODEL
        assert session["codecs"] == [["prod4", "int8"], ["prod4", "int8"], ["exact", "uni4"]]
    assert listed["small"]["shared_nbytes"] == 0


def test_the_stores_bytes_are_all_files(chats: Path, run: Run) -> None:
    told = run("ls", "--store", chats, "--json").json
    assert told["nbytes"] == sum(f.stat().st_size for f in chats.rglob("*") if f.is_file())
    assert sum(each["packs"] for each in told["namespaces"]) == len(packs_of(chats))


def test_the_table_says_it_all_to_people(chats: Path, run: Run) -> None:
    ran = run("ls", "--store", chats)
    assert ran.code == 0
    assert ran.err == ""
    row = next(line for line in ran.out.splitlines() if line.startswith("chat one"))
    for told in ("340", "20", "KiB", "prod4/int8 x2, exact/uni4 x1", MODEL[:12]):
        assert told in row
    assert f"3 sessions, 2 namespaces, {len(packs_of(chats))} packs" in ran.out
    assert str(chats) in ran.out


def test_metadata_comes_as_json_can_hold_it(chats: Path, run: Run) -> None:
    sessions = run("ls", "--store", chats, "--json").json["sessions"]
    metadata = next(each["metadata"] for each in sessions if each["name"] == "chat one")
    assert metadata == {"title": "red \x1b[31m", "limit": "inf", "raw": "0102"}


def test_packs_are_the_files_on_disk(chats: Path, run: Run) -> None:
    told = run("ls", "--store", chats, "--packs", "--json").json["packs"]
    files = packs_of(chats)
    assert {each["path"]: each["nbytes"] for each in told} == {
        str(file.relative_to(chats)): file.stat().st_size for file in files
    }
    assert run("ls", "--store", chats, "--packs").out.count("/c.") == len(files)


def test_a_damaged_pack_is_listed_as_such(
    chats: Path, run: Run, expected_findings: set[str]
) -> None:
    expected_findings |= {"pack", "reference"}
    flip(packs_of(chats)[0], 30)
    told = run("ls", "--store", chats, "--packs", "--json").json["packs"]
    problems = [each["problem"] for each in told if each["problem"]]
    assert len(problems) == 1
    assert "checksum" in problems[0]
    assert "damaged" in run("ls", "--store", chats, "--packs").out


def test_a_damaged_session_is_listed_as_such(
    chats: Path, run: Run, expected_findings: set[str]
) -> None:
    expected_findings.add("checkpoint")
    for checkpoint in chats.glob("sessions/chat-one-*/*.ckpt"):
        flip(checkpoint, 40)
    ran = run("ls", "--store", chats)
    assert ran.code == 0
    assert "damaged" in ran.out
    assert "checksum" in ran.out
    problems = [each["problem"] for each in run("ls", "--store", chats, "--json").json["sessions"]]
    assert sum(problem is not None for problem in problems) == 1


def test_a_session_of_an_unreadable_namespace_is_still_listed(
    chats: Path, run: Run, expected_findings: set[str]
) -> None:
    expected_findings |= {"namespace", "checkpoint"}
    for file in chats.glob("ns/*/namespace.msgpack"):
        flip(file, 30)
    ran = run("ls", "--store", chats)
    assert "chat one" in ran.out
    assert "unreadable" in ran.out


def test_an_empty_store_says_how_to_begin(store_dir: Path, run: Run) -> None:
    tqstore.Store.open(store_dir).close()
    ran = run("ls", "--store", store_dir)
    assert ran.code == 0
    assert "No sessions" in ran.out
    assert "tqstore.mlx_lm.session(" in ran.out
    assert run("ls", "--store", store_dir, "--json").json["sessions"] == []
    assert "0 packs" in run("ls", "--store", store_dir, "--packs").out


@pytest.mark.parametrize("command", [["ls"], ["inspect", "chat"], ["verify"]])
def test_reading_never_makes_a_store(tmp_path: Path, run: Run, command: list[str]) -> None:
    ran = run(*command, "--store", tmp_path / "none")
    assert ran.code == 11
    assert "no store at" in the_error(ran)
    assert list(tmp_path.iterdir()) == []


def test_the_place_of_the_store(chats: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("ls", "--store", chats, "--json").out
    assert run("--store", chats, "ls", "--json").out == expected
    # The nearer one counts.
    assert run("--store", "/nowhere", "ls", "--store", chats, "--json").out == expected
    monkeypatch.setenv("TQSTORE_HOME", str(chats))
    assert run("ls", "--json").out == expected


def test_what_is_no_store_is_refused(tmp_path: Path, run: Run) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    ran = run("ls", "--store", tmp_path)
    assert ran.code == 13
    assert "thesis.txt" in the_error(ran)
    ran = run("ls", "--store", tmp_path / "thesis.txt")
    assert ran.code == 13
    assert "thesis.txt is a file, not a store" in the_error(ran)
    ran = run("ls", "--store", tmp_path / "thesis.txt" / "x" / "y")
    assert ran.code == 13
    assert f"{tmp_path / 'thesis.txt'} is a file, so that no store can be at" in the_error(ran)


def test_reading_changes_nothing(chats: Path, run: Run) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        files = (file for file in chats.rglob("*") if file.is_file())
        return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}

    before = state()
    for command in (["ls"], ["ls", "--packs"], ["inspect", "fork"], ["verify"]):
        assert run("--store", chats, *command).code == 0
    assert state() == before
