"""docs/security.md: who may read a store, and what a hostile one may do to its reader.

Fuzzing of the decoders is tests/store/test_fuzz.py.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import socket
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.synthetic import NAMESPACE, SPEC, chain, check_readable, packs, save
from tqstore.errors import Corrupt, InvalidInput, NotFound, TqStoreError
from tqstore.format.block_hash import BlockRecord
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackHeader, PackLayout, pack_buffers
from tqstore.store.gc_plan import GcOptions
from tqstore.store.names import is_session_folder, session_folder
from tqstore.store.page_store import PageStore

ROOT = Path(__file__).parents[2]
DEMO = chain(3)
NOW = GcOptions(grace_seconds=0, drops_quarantine=True)
TERABYTE = 1 << 40
MIB = 1 << 20
HOSTILE = {
    *("format", "namespace", "zarr", "pack", "index", "page", "block", "checkpoint", "reference"),
    *("leftover", "stranger", "access", "folder", "link", "gone"),
}


@pytest.fixture
def saved(store_dir: Path, expected_findings: set[str]) -> Path:
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO, 0, 2)
        save(store, "demo", DEMO, 2, 3)
    expected_findings |= HOSTILE
    return store_dir


# Who may read


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_secure_promise_1_private_whatever_the_umask(store_dir: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with PageStore.open(store_dir) as store:
            save(store, "demo", DEMO)
            save(store, "gone", chain(2, 9))
            store.remove("gone")
            store.gc(NOW)
            save(store, "demo", DEMO)
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in store_dir.rglob("*")}
    assert len(found) > 12
    assert {
        path: mode for path, mode in found.items() if mode != (0o700, 0o600)[path.is_file()]
    } == {}
    assert stat.S_IMODE(store_dir.stat().st_mode) == 0o700


def test_secure_promise_1_what_others_may_read_is_reported_and_repaired(saved: Path) -> None:
    packs(saved)[0].chmod(0o644)
    (saved / "sessions").chmod(0o755)
    with PageStore.open(saved) as store:
        assert {finding.kind for finding in store.verify()} == {"access"}
        store.repair()
        assert list(store.verify()) == []


# No pickle

FORBIDDEN_MODULES = {
    *("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def dangers(source: str) -> list[str]:
    """Uses of what turns stored bytes into code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [n.name for n in names if n.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(name)
            case ast.keyword(arg="allow_pickle", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    found.append("allow_pickle")
    return found


@pytest.mark.parametrize("folder", ["tqstore", "tools"])
def test_secure_promise_2_no_pickle_anywhere(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 10
    assert {str(f): d for f in files if (d := dangers(f.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal as m",
        "from pickle import loads",
        "def f():\n    from dill import load",
        "eval('1')",
        "x = np.load('f', allow_pickle=True)",
    ],
)
def test_a_danger_is_seen(source: str) -> None:
    assert dangers(source)


# Names

BAD_NAMES = [
    *(
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc/passwd",
        "a\0b",
        ".hidden",
        " x",
        "x ",
        "a\nb",
        "ä",
        "a:b",
    ),
    *("x" * 129, "a\\b", "~", "$HOME", "a*", "\u202egpj", "LOCK/../x"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_secure_promise_3_names_that_could_be_paths_are_refused(saved: Path, name: str) -> None:
    before = sorted(saved.parent.rglob("*"))
    with PageStore.open(saved) as store:
        for use in (store.latest, store.remove, store.purge):
            with pytest.raises(InvalidInput, match="cannot name a session"):
                use(name)
        store.note_use(name)  # only a note: it may not fail, nor do anything
        with store.commit() as commit, pytest.raises(InvalidInput, match="cannot name a session"):
            commit.publish(name, DEMO.checkpoint(2))
    assert sorted(saved.parent.rglob("*")) == before


@given(st.text())
def test_secure_promise_3_any_name_is_refused_or_one_safe_folder(name: str) -> None:
    try:
        folder = session_folder(name)
    except InvalidInput:
        return
    assert re.fullmatch(r"[a-z0-9_-]{1,40}-[0-9a-f]{16}", folder)
    assert is_session_folder(folder)


def test_secure_promise_3_strange_names_on_the_disk_are_no_sessions(saved: Path) -> None:
    for name in ("..x", "a b-0123456789abcdef", "X-0123456789abcdef", "-" * 41 + "-" + "0" * 16):
        (saved / "sessions" / name).mkdir(mode=0o700)
        (saved / "sessions" / name / "000000000001.ckpt").write_bytes(b"x")
    (saved / "ns" / ("A" * 64)).mkdir(mode=0o700)
    with PageStore.open(saved) as store:
        assert [info.name for info in store.sessions()] == ["demo"]
        assert len(store.namespaces()) == 1
        store.gc(NOW)
        check_readable(store, "demo", DEMO, 3)
    assert len(list((saved / "sessions").iterdir())) == 5, "gc deletes only what it knows"


# Links


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder that looks like a part of a store, and must be as it was at the end."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("000000000001.ckpt", "c.1.0", ".tmp-1-a", "namespace.msgpack", "zarr.json"):
        (folder / name).write_bytes(b"precious")
    (folder / "pages").mkdir()
    (folder / "pages" / "c.2.0").write_bytes(b"precious")
    yield folder
    assert sorted(f.read_bytes() for f in folder.rglob("*") if f.is_file()) == [b"precious"] * 6


def test_secure_promise_4_nothing_is_done_through_a_link(saved: Path, outside: Path) -> None:
    """Links wherever gc, purge, repair and remove delete: their targets stay untouched."""
    spec_folder = next(saved.glob("ns/*/pages/*"))
    places = [
        saved / "sessions" / session_folder("linked"),
        saved / "ns" / ("0" * 64),
        spec_folder.parent / "prod4-int8-h1-d64-000000000000",
        spec_folder / "c.5.0",
        saved / "sessions" / ".tmp-1-dead",
        saved / "gone",
        saved / "quarantine",
        next(saved.glob("sessions/demo-*")) / "000000000000.ckpt",
        spec_folder / ".tmp-2-dead",
    ]
    for place in places:
        place.symlink_to(outside)
    with PageStore.open(saved) as store:
        for act in (
            lambda: store.remove("linked"),
            lambda: store.purge("linked"),
            lambda: store.gc(NOW),
            lambda: store.repair(),
            lambda: store.stats(),
            lambda: list(store.verify()),
            lambda: store.purge("demo"),
        ):
            try:
                act()
            except TqStoreError:
                continue
    for place in places:
        place.unlink(missing_ok=True)


def test_secure_promise_4_a_linked_root_is_followed_and_made_private(tmp_path: Path) -> None:
    """The one link that is the user's own choice."""
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with PageStore.open(tmp_path / "link") as store:
        save(store, "demo", DEMO)
    assert (tmp_path / "real" / "FORMAT").exists()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o700


# Hostile folders


def look_at_everything(path: Path) -> None:
    """What a user would do with a store from elsewhere; only TqStoreError may come out."""
    for act in (
        lambda store: store.sessions(),
        lambda store: store.namespaces(),
        lambda store: store.latest("demo"),
        lambda store: check_readable(store, "demo", DEMO, 3),
        lambda store: list(store.verify()),
        lambda store: store.plan_gc(NOW),
        lambda store: store.stats(),
    ):
        try:
            with PageStore.open(path, mode="r") as store:
                act(store)
        except (TqStoreError, AssertionError):
            continue


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_secure_promise_5_files_of_a_terabyte_take_no_memory(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sparse files cost their author nothing."""
    caplog.set_level(logging.ERROR)
    for file in files_of(saved):
        nbytes = file.stat().st_size
        try:
            os.truncate(file, TERABYTE)
        except OSError:
            pytest.skip("this file system has no files of a terabyte")
        tracemalloc.start()
        try:
            look_at_everything(saved)
            assert tracemalloc.get_traced_memory()[1] < 20 * MIB, file.name
        finally:
            tracemalloc.stop()
        os.truncate(file, nbytes)
    with PageStore.open(saved) as store:
        check_readable(store, "demo", DEMO, 3)


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder"])
def test_secure_promise_5_things_that_are_no_files_do_not_block(
    saved: Path, kind: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.ERROR)
    for file in files_of(saved):
        kept = tmp_path / "kept"
        file.rename(kept)
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            here = os.getcwd()
            os.chdir(file.parent)  # a socket's path must be short
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(file.name)
            os.chdir(here)
        look_at_everything(saved)
        with (
            PageStore.open(saved, mode="r")
            if file.name != "FORMAT"
            else pytest.raises(TqStoreError) as store
        ):
            if file.name == "FORMAT":
                PageStore.open(saved)
            else:
                assert list(store.verify())
        file.rmdir() if kind == "folder" else file.unlink()
        kept.rename(file)


BOMBS = {
    "deep": b"[" * 900_000,
    "wide": b'{"a":' + b"[" + b"0," * 400_000 + b"0]}",
    "gzip": b"\x1f\x8b" + bytes(1000),
    "many times": b'{"shape":[' + b"9" * 900_000 + b"]}",
    "codec": b'{"codecs":[{"name":"gzip"}],"zarr_format":3}',
    "too long": b" " * (2 * MIB),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_secure_promise_5_zarr_json_is_compared_and_never_parsed(saved: Path, bomb: str) -> None:
    """So there is nothing in it that could expand."""
    next(saved.rglob("zarr.json")).write_bytes(BOMBS[bomb])
    tracemalloc.start()
    try:
        with PageStore.open(saved) as store:
            assert {finding.kind for finding in store.verify()} == {"zarr"}
            check_readable(store, "demo", DEMO, 3)
            with pytest.raises(Corrupt):
                save(store, "other", chain(1, 5))
        assert tracemalloc.get_traced_memory()[1] < 10 * MIB
    finally:
        tracemalloc.stop()


def forged_pack(blocks: list[BlockRecord], layer: int = 0) -> bytes:
    """A pack right in every checksum, of blocks whose hashes are not those of their tokens."""
    keys = [(layer, block.hash) for block in blocks]
    header = PackHeader.of(SPEC, blocks, keys).encode()
    return b"".join(pack_buffers(PackLayout.of(SPEC), header, list(DEMO.records(SPEC, keys))))


def test_secure_promise_5_blocks_that_follow_each_other_in_a_circle(saved: Path) -> None:
    """Parents that lead back: nothing walks them for ever."""
    folder = next(saved.glob("ns/*/pages/*"))
    a, b = b"a" * 16, b"b" * 16
    tokens = DEMO.blocks[0].tokens
    circle = [[BlockRecord(a, b, tokens)], [BlockRecord(b, a, tokens)], [BlockRecord(a, a, tokens)]]
    for number, blocks in enumerate(circle, 7):
        (folder / f"c.{number}.0").write_bytes(forged_pack(blocks))
        (folder / f"c.{number}.0").chmod(0o600)
        os.utime(folder / f"c.{number}.0", ns=(0, 0))
    with PageStore.open(saved) as store:
        assert {f.kind for f in store.verify()} == {"block"}
        report = store.gc(GcOptions(grace_seconds=0))
        assert report.packs_deleted == 3
        check_readable(store, "demo", DEMO, 3)
        assert list(store.verify()) == []


def test_secure_promise_5_thousands_of_packs_that_claim_one_block(saved: Path) -> None:
    """Found and dropped one by one, without recursion."""
    folder = next(saved.glob("ns/*/pages/*"))
    content = forged_pack(DEMO.blocks[:1])
    (folder / "c.1.0").write_bytes(content)
    for number in range(2, 3000):
        os.link(folder / "c.1.0", folder / f"c.{number}.0")
    with PageStore.open(saved, mode="r") as store:
        ns = store.namespace(NAMESPACE)
        assert ns.locate(SPEC, 0, DEMO.hashes[0]) is not None
        for number in range(1, 3000):
            (folder / f"c.{number}.0").unlink()
        assert ns.refresh()
        check_readable(store, "demo", DEMO, 3)


def test_secure_promise_5_a_summary_with_more_layers_than_there_may_be() -> None:
    from tools.faults.decoders import TARGETS, bodies, framed

    summary, state = bodies("checkpoint")
    summary["reach"] = [[None, 0, 0]] * 5000
    with pytest.raises(Corrupt, match="5000 layers"):
        TARGETS["summary"](framed("checkpoint", [summary, state]))


# Tenants


def test_secure_promise_6_tenants_share_nothing_and_the_salt_is_not_told(store_dir: Path) -> None:
    """Equal tokens, another salt: another namespace, other hashes; neither finds the other's."""
    tenants = [
        Namespace.of("ab" * 8, [SPEC] * 3, tenant_salt=salt)
        for salt in (b"secret-one", b"two", None)
    ]
    chains = [chain(2, 0, tenant) for tenant in tenants]
    with PageStore.open(store_dir) as store:
        save(store, "one", chains[0])
        for other in chains[1:]:
            ns = store.namespace(other.namespace)
            assert ns.match([SPEC] * 3, [None] * 3, [0] * 3, other.hashes) == 0
            assert set(other.hashes).isdisjoint(chains[0].hashes)
    everything = b"".join(file.read_bytes() for file in files_of(store_dir))
    assert b"secret-one" not in everything


def test_a_prompt_can_be_rebuilt_from_a_store(store_dir: Path) -> None:
    """What docs/security.md warns of: the tokens lie in the packs as they are."""
    with PageStore.open(store_dir) as store:
        save(store, "demo", DEMO)
        tokens = store.namespace(NAMESPACE).tokens_of(DEMO.hashes)
    raw = b"".join(pack.read_bytes() for pack in packs(store_dir))
    assert tokens.astype("<i8").tobytes() in raw


def test_a_session_that_is_not_there_is_told_from_a_bad_name(store_dir: Path) -> None:
    with PageStore.open(store_dir) as store, pytest.raises(NotFound):
        store.remove("nobody")
