"""`tqstore gc`, `rm`, `purge`, `stats`, `why-miss` and `verify --repair`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import mlx.core as mx
import pytest
import typer

from tests.cli.conftest import MODEL, SPEC, Run, feed, flip, packs_of, the_error
from tools.make_test_store import make as make_old_store
from tqstore.cli.options import nbytes_of
from tqstore.session import Store


def nbytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_gc_of_a_store_without_garbage(chats: Path, run: Run) -> None:
    for options in ([], ["--dry-run"]):
        ran = run("gc", "--store", chats, "--grace", 0, "--compact-at", 1, *options)
        assert (ran.code, ran.err) == (0, "")
        assert "0 B" in ran.out
    assert len(list(packs_of(chats))) > 0


def test_rm_dry_run_and_gc(chats: Path, run: Run) -> None:
    assert run("rm", "fork", "--store", chats).code == 0
    before = nbytes_in(chats)
    planned = run("gc", "--dry-run", "--grace", 0, "--store", chats, "--json").json
    assert nbytes_in(chats) == before
    assert planned["freed_nbytes"] > 0
    assert {pack["why"] for pack in planned["packs"]} == {"no session needs its pages"}
    assert (
        "no session needs its pages" in run("gc", "--dry-run", "--grace", 0, "--store", chats).out
    )
    spared = run("gc", "--store", chats)
    assert "nothing to delete" in spared.out
    report = run("gc", "--grace", 0, "--store", chats, "--json").json
    assert report["packs_deleted"] == len(planned["packs"])
    assert report["freed_nbytes"] == planned["freed_nbytes"]
    assert nbytes_in(chats) < before
    assert "nothing to delete" in run("gc", "--grace", 0, "--store", chats).out
    assert run("verify", "--store", chats).code == 0


def test_rm_of_a_namespace_frees_everything(chats: Path, run: Run) -> None:
    namespace = packs_of(chats)[0].parents[2]
    assert run("rm", "--namespace", "01234567", "--store", chats).code == 11
    told = run("rm", "--namespace", namespace.name[:10], "--store", chats, "--json").json
    assert sorted(told["removed"]) == ["chat one", "fork"]
    used = run("stats", "--store", chats, "--json").json["namespaces"]
    assert {use["id"]: use["num_sessions"] for use in used}[namespace.name] == 0
    report = run("gc", "--grace", 0, "--store", chats, "--json").json
    assert report["namespaces_deleted"] == 1
    assert not namespace.exists()
    assert run("rm", "--store", chats).code == 2
    assert "no session" in the_error(run("rm", "gone", "--store", chats))


def names_in(chats: Path, run: Run) -> list[str]:
    return sorted(each["name"] for each in run("ls", "--store", chats, "--json").json["sessions"])


def test_rm_checks_all_names_before_it_removes_one(chats: Path, run: Run) -> None:
    ran = run("rm", "fork", "gone", "gone too", "--store", chats)
    assert ran.code == 11
    assert "there is no session 'gone', 'gone too'" in the_error(ran)
    assert names_in(chats, run) == ["chat one", "fork", "small"]
    ran = run("rm", "fork", "fork", "--store", chats)
    assert (ran.code, ran.out.count("removed fork")) == (0, 1)
    assert names_in(chats, run) == ["chat one", "small"]


def test_rm_takes_names_or_a_namespace_of_some_digits(chats: Path, run: Run) -> None:
    namespace = packs_of(chats)[0].parents[2].name
    for wrong in ([namespace, "fork"], [namespace[:7]], [""]):
        ran = run("rm", "--namespace", *wrong, "--store", chats)
        assert ran.code == 2, wrong
    assert "at least 8 digits" in ran.err
    assert names_in(chats, run) == ["chat one", "fork", "small"]


def test_what_an_unreadable_checkpoint_needs_is_said_to_be_garbage(
    chats: Path, run: Run, expected_findings: set[str]
) -> None:
    expected_findings |= {"checkpoint"}
    (checkpoint,) = chats.glob("sessions/fork-*/*.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:50])
    said = "count as garbage, once unused for 600 s: put a copy of it back before gc runs"
    for command in (["stats"], ["gc", "--dry-run"], ["gc"]):
        assert said in run(*command, "--store", chats).out, command
    told = run("gc", "--dry-run", "--grace", 0, "--store", chats)
    assert "count as garbage: put a copy of it back" in told.out
    assert "no session needs its pages" in told.out
    assert "count as garbage: put a copy of it back" in run("purge", "small", "--store", chats).out


@pytest.mark.parametrize("command", ["rm", "purge"])
def test_a_session_nobody_can_read_goes_by_the_name_it_is_listed_by(
    chats: Path, run: Run, command: str
) -> None:
    (fork,) = chats.glob("sessions/fork-*")
    assert run(command, fork.name, "--store", chats).code == 11  # it can be read: by its own name
    flip(next(fork.glob("*.ckpt")), 50)
    assert fork.name in names_in(chats, run)
    assert run("why-miss", fork.name, "--store", chats).code == 15
    ran = run(command, fork.name, "--store", chats)
    assert ran.code == (0 if command == "rm" else 1)
    if command == "purge":
        assert "kept back: pages that only this checkpoint named, for gc" in ran.out
    assert not fork.exists()
    assert names_in(chats, run) == ["chat one", "small"]
    assert run(command, fork.name, "--store", chats).code == 11


def test_gc_with_a_size(chats: Path, run: Run) -> None:
    used = nbytes_in(chats)
    assert run("gc", "--max-bytes", used, "--store", chats).code == 0
    ran = run("gc", "--max-bytes", used - 1, "--store", chats, "--json")
    assert ran.code == 1, "every byte is of sessions without end"
    assert ran.json["nbytes"] <= used
    run("rm", "fork", "--store", chats)
    assert run("gc", "--max-bytes", f"{used - 1}B", "--grace", 0, "--store", chats).code == 0
    assert nbytes_in(chats) < used
    ran = run("gc", "--max-bytes", 5, "--store", chats)
    assert ran.code == 1
    assert "stay because of --grace: used in the last 600 s" in ran.out
    assert "2 sessions without an end" in ran.out
    ran = run("gc", "--max-bytes", 5, "--grace", 0, "--store", chats)
    assert (ran.code, "deleted" in ran.out) == (1, True)
    assert "2 sessions without an end" in ran.out
    assert "because of --grace" not in ran.out
    assert run("gc", "--max-bytes", "x", "--store", chats).code == 2
    for option in (["--drop-history"], ["--drop-quarantine"], ["--compact-at", 0.5]):
        refused = run("gc", "--max-bytes", "5", *option, "--store", chats)
        assert (refused.code, option[0] in the_error(refused)) == (2, True)
    assert run("gc", "--max-bytes", "5", "--dry-run", "--store", chats).code == 2


def test_sizes() -> None:
    told = {"500": 500, "1.5GiB": 3 << 29, "2GB": 2 * 10**9, "3 KiB": 3072, "7k": 7000, "0b": 0}
    assert {text: nbytes_of(text) for text in told} == told
    for text in ("", "GB", "-1", "1e9", "5 XB"):
        with pytest.raises(typer.BadParameter):
            nbytes_of(text)


def test_purge_says_who_shares(chats: Path, run: Run) -> None:
    told = run("purge", "fork", "--store", chats, "--json").json
    assert list(told["shared"]) == ["chat one"]
    assert 0 < told["shared"]["chat one"] < told["blocks"]
    ran = run("purge", "chat one", "--store", chats)
    assert (ran.code, ran.err) == (0, "")
    assert "holds" not in ran.out
    assert packs_of(chats) == []
    assert run("purge", "fork", "--store", chats).code == 11
    assert [s["name"] for s in run("ls", "--store", chats, "--json").json["sessions"]] == ["small"]


def test_stats_add_up(chats: Path, run: Run) -> None:
    stats = run("stats", "--store", chats, "--json").json
    assert stats["nbytes"] == nbytes_in(chats)
    assert stats["pack_nbytes"] == nbytes_in(chats / "ns")
    assert stats["num_packs"] == len(packs_of(chats))
    told = run("stats", "--store", chats).out
    assert "3 sessions" in told
    assert stats["history_nbytes"] > 0  # a layer has a window of 100 of 300 tokens
    assert "window history" in told


def test_stats_and_inspect_show_what_pages_did_in_another_process(
    store_dir: Path, run: Run
) -> None:
    budget = 40 * max(page.page_nbytes for page in SPEC.page_specs)
    with Store.open(store_dir) as store:
        told = {}
        for number, name in enumerate(("one", "two")):  # of one pool
            cache = store.new_cache(SPEC, model=MODEL, memory_budget=budget)
            cache.tell(range(1000 * number, 1000 * number + 900))
            feed(cache, 900)
            for layer, spec in enumerate(SPEC.layers):
                cache.attend(layer, mx.zeros((spec.kv_heads, 1, spec.head_dim), mx.float16))
            store.save(name, cache, range(1000 * number, 1000 * number + 900))
            told[name] = cache.stats
        other = store.new_cache(SPEC, model="cd" * 32, memory_budget=budget)
        feed(other, 100)
        store.save("other", other, range(100))
        told["other"] = other.stats
    stats = run("stats", "--store", store_dir, "--json").json
    shown = {session["name"]: session["paging"] for session in stats["sessions"]}
    assert list(shown) == ["other", "two", "one"]
    assert shown["one"]["pool"] == shown["two"]["pool"] != shown["other"]["pool"]
    for name, figures in told.items():
        assert figures.paging.items() <= shown[name].items()
        assert shown[name]["budget_nbytes"] == budget
    assert told["two"].paging["spilled_pages"] > told["one"].paging["spilled_pages"] > 0
    assert told["two"].paging["streamed_nbytes"] > 0
    for name, count in stats["paging"].items():  # the pool of "one" is counted once, at its last
        assert count == shown["two"][name] + shown["other"][name]
    text = run("stats", "--store", store_dir).out
    assert "as of each session's last save" in text
    assert f"{stats['paging']['hits']:,} hit" in text
    assert f"{stats['paging']['spilled_pages']:,} spilled" in text
    inspected = run("inspect", "one", "--store", store_dir, "--json").json
    assert inspected["paging"] == shown["one"]
    line = next(
        line
        for line in run("inspect", "one", "--store", store_dir).out.splitlines()
        if line.startswith("memory")
    )
    assert f"{told['one'].paging['restored_pages']:,} restored" in line


def test_stats_of_sessions_that_tell_no_counters(run: Run, tmp_path: Path) -> None:
    make_old_store(tmp_path / "store")
    stats = run("stats", "--store", tmp_path / "store", "--json").json
    assert (stats["paging"], stats["sessions"]) == ({}, [])
    assert "Memory" not in run("stats", "--store", tmp_path / "store").out
    assert "not known" in run("inspect", "first", "--store", tmp_path / "store").out


def test_why_miss_of_a_session(chats: Path, run: Run, expected_findings: set[str]) -> None:
    ran = run("why-miss", "chat one", "--store", chats)
    assert ran.code == 0
    assert "all is there" in ran.out
    assert run("why-miss", "small", "--store", chats).code == 0
    expected_findings |= {"reference"}
    packs_of(chats)[0].unlink()
    ran = run("why-miss", "chat one", "--store", chats)
    assert "pages are missing, and where they went is not noted" in ran.out
    ran = run("why-miss", "chat one", "--store", chats, "--json")
    assert ran.code == 1
    assert ran.json["misses"][0]["kind"] == "no such prefix"
    assert run("why-miss", "gone", "--store", chats).code == 11
    assert run("why-miss", "--store", chats).code == 2


def test_a_damaged_page_is_set_aside_by_repair_and_by_nothing_else(
    chats: Path, run: Run, expected_findings: set[str]
) -> None:
    expected_findings |= {"page", "reference"}
    page = run("inspect", "fork", "-p", 20, "--store", chats, "--json").json
    pack, slot = chats / page["pack"], page["slot"]
    whole = run("inspect", pack, "--json").json
    flip(pack, whole["first_slot"] + slot * whole["stride"] + 500)
    ran = run("inspect", "fork", "-p", 20, "--store", chats)
    assert ran.code == 15
    told = "A shorter prefix is still good; `tqstore verify --repair` sets the page aside"
    assert the_error(ran).endswith(told)
    assert run("stats", "--store", chats, "--json").json["quarantine_nbytes"] == 0
    assert run("why-miss", "fork", "--store", chats).code == 0  # it reads no page
    run("verify", "--repair", "--store", chats)
    assert run("stats", "--store", chats, "--json").json["quarantine_nbytes"] > 0
    ran = run("why-miss", "fork", "--store", chats)
    assert (ran.code, "corrupt: layer 0 of block 20" in ran.out) == (1, True)


def test_why_miss_of_tokens(chats: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(json.dumps(list(range(-5, 295))))
    ran = run("why-miss", "--tokens", file, "--store", chats)
    assert ran.code == 0, ran.out
    file.write_text(" ".join(map(str, range(-5, 100))) + " 7" * 50)
    misses = run("why-miss", "--tokens", file, "--store", chats, "--json").json["misses"]
    assert sorted((miss["kind"], miss["num_blocks"]) for miss in misses) == [
        ("no such prefix", 0),
        ("no such prefix", 6),
    ]
    for wrong in ("{}", "[1.5]", "a b", "[1, [2]]", "[1, 2"):
        file.write_text(wrong)
        ran = run("why-miss", "--tokens", file, "--store", chats)
        assert ran.code == 13, wrong
        assert the_error(ran).endswith(
            f"reading tokens: {file} does not hold token ids. Give a JSON list of integers, or "
            "integers separated by white space"
        )
    assert "is a folder" in the_error(run("why-miss", "--tokens", tmp_path, "--store", chats))
    assert run("why-miss", "--tokens", tmp_path / "none", "--store", chats).code == 11


def test_why_miss_names_the_field_that_differs(chats: Path, run: Run, tmp_path: Path) -> None:
    with Store.open(chats) as store:
        other = store.new_cache(SPEC, model="cd" * 32)
        feed(other, 40)
        store.save("other model", other, list(range(9000, 9040)))
        mine = store.namespace(SPEC, "cd" * 32).id.hex()
    file = tmp_path / "tokens"
    file.write_text(json.dumps(list(range(-5, 95))))
    ran = run("why-miss", "--tokens", file, "--namespace", mine[:8], "--store", chats)
    assert ran.code == 1
    assert "namespace differs: model.fingerprint" in ran.out
    assert MODEL[:8] in ran.out


def test_why_miss_of_an_expired_session(chats: Path, run: Run) -> None:
    with Store.open(chats) as store:
        cache = store.new_cache(SPEC, model=MODEL)
        feed(cache, 20)
        store.save("brief", cache, list(range(20)), ttl=0.001)
    listed = {s["name"]: s for s in run("ls", "--store", chats, "--json").json["sessions"]}
    assert 0 < listed["brief"]["expires_ns"] < time.time_ns()
    assert listed["small"]["expires_ns"] == 0
    assert "until 20" in run("inspect", "brief", "--store", chats).out
    assert "until it is removed" in run("inspect", "small", "--store", chats).out
    time.sleep(0.01)
    assert "1 expired session" in run("gc", "--grace", 0, "--store", chats).out
    ran = run("why-miss", "brief", "--store", chats)
    assert ran.code == 11
    assert "expired" in the_error(ran)


def test_verify_repair(chats: Path, run: Run, expected_findings: set[str]) -> None:
    expected_findings |= {"reference"}
    flip(packs_of(chats)[0], packs_of(chats)[0].stat().st_size // 2)
    os.chmod(packs_of(chats)[1], 0o644)
    ran = run("verify", "--repair", "--store", chats)
    assert ran.code == 1, "a page is lost"
    assert ": made private again" in ran.out
    assert "good pages of it written into a new pack" in ran.out
    told = run("verify", "--repair", "--store", chats, "--json")
    assert told.json["repairs"] == []
    assert {finding["kind"] for finding in told.json["findings"]} == {"reference"}
    assert "set aside" in run("stats", "--store", chats).out
    run("gc", "--drop-quarantine", "--store", chats)
    assert list((chats / "quarantine").iterdir()) == []


@pytest.mark.parametrize("command", ["gc", "stats", "verify"])
def test_no_store_is_made(tmp_path: Path, run: Run, command: str) -> None:
    ran = run(command, "--store", tmp_path / "none")
    assert ran.code == 11
    assert "there is no store" in the_error(ran)
    assert not (tmp_path / "none").exists()
