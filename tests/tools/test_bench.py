"""tools/bench: each benchmark at a toy size, the shape of what it writes, and the runner's parts.

No time is judged here: on a shared machine that would only say how busy it was.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("mlx_lm")

from tools import real_model
from tools.benchmarks import __main__ as bench
from tools.benchmarks import machine, report, timing, veloxquant
from tools.benchmarks.cases import restore, second_process_prefix
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.synthetic import FULL, TOY
from tools.benchmarks.workshop import Workshop, nbytes_below

ROOT = Path(__file__).resolve().parents[2]
PROMISED = {
    "save-incremental",
    "save-full",
    "restore",
    "encode",
    "bytes-per-token",
    "lookup-1m-pages",
    "open-10k-packs",
    "second-process-prefix",
}
KEYS = {"name", "value", "unit", "peer", "peer_value", "ratio", "bar", "met", "note"}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Installs nothing: VeloxQuant's row then has no peer value."""
    return Workshop(tmp_path_factory.mktemp("bench"), TOY)


def test_what_was_promised_is_there() -> None:
    assert set(bench.names()) >= PROMISED


@pytest.mark.parametrize("name", bench.names())
def test_each_benchmark_gives_sane_rows(name: str, workshop: Workshop) -> None:
    if name == second_process_prefix.NAME and not real_model.is_available():
        pytest.skip("the `model` extra is not installed")
    rows = bench.benchmark(name)(workshop)
    assert rows[0].name == name
    assert all(row.name.startswith(f"{name}/") for row in rows[1:])
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert math.isfinite(row.value)
        assert row.value > 0
        assert row.unit
        assert row.peer
        if row.peer_value is None:
            assert row.note, "a peer that was not measured needs a reason"
        else:
            assert math.isfinite(row.peer_value)
            assert row.peer_value > 0
        json.loads(json.dumps(row.as_json(), allow_nan=False))


def test_bytes_per_token_are_those_of_the_files(workshop: Workshop) -> None:
    row = bench.benchmark("bytes-per-token")(workshop)[0]
    folder = workshop.saved_store(TOY.tokens)
    counted = int(subprocess.check_output(["du", "-sb", "--apparent-size", folder]).split()[0])
    folders = sum(path.stat().st_size for path in [folder, *folder.rglob("*")] if path.is_dir())
    assert nbytes_below(folder) == counted - folders
    assert row.value == nbytes_below(folder) / TOY.tokens
    assert row.peer_value == 2 * 2 * TOY.layers * TOY.heads * TOY.head_dim


def test_restoring_counts_every_sealed_page(workshop: Workshop) -> None:
    seconds, nbytes = restore.restore_all(workshop.saved_store(TOY.tokens))
    sealed = (TOY.tokens - TOY.spec.recent_tokens) // TOY.spec.page_tokens
    assert seconds > 0
    assert nbytes == sealed * TOY.layers * TOY.spec.page_specs[0].page_nbytes


def test_a_raw_read_that_is_short_is_not_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "pack").write_bytes(bytes(100))
    with (
        restore.opened(tmp_path / "pack") as descriptor,
        pytest.raises(RuntimeError, match="100 of 4096"),
    ):
        restore.read_raw([descriptor], restore.mapped(4096))


def test_medians_take_turns_and_leave_out_the_warm_up() -> None:
    order: list[str] = []
    seconds = iter([900.0, 700.0, 1.0, 10.0, 5.0, 50.0, 3.0, 20.0])

    def trial(name: str) -> timing.Trial:
        return lambda: (order.append(name), next(seconds))[1]

    progress: list[tuple[int, int]] = []
    taken = timing.medians(
        {"a": trial("a"), "b": trial("b")}, 3, lambda done, total: progress.append((done, total))
    )
    assert order == ["a", "b"] * 4
    assert taken == {"a": 3.0, "b": 20.0}
    assert progress == [(done, 8) for done in range(9)]
    with pytest.raises(ValueError, match="rounds"):
        timing.medians({"a": trial("a")}, 0)


@pytest.mark.parametrize(
    ("bar", "value", "peer_value", "met", "verdict"),
    [
        (Bar(0.42), 0.42, 1.0, True, "<= 0.42, met"),
        (Bar(0.42), 0.43, 1.0, False, "<= 0.42, NOT met"),
        (Bar(0.4, at_most=False), 0.4, 1.0, True, ">= 0.4, met"),
        (Bar(0.4, at_most=False), 0.3, 1.0, False, ">= 0.4, NOT met"),
        (Bar(0.01), 1.0, None, None, "<= 0.01, not measured"),
        (None, 1.0, 2.0, None, ""),
    ],
)
def test_bars(
    bar: Bar | None, value: float, peer_value: float | None, met: bool | None, verdict: str
) -> None:
    row = Row("x", value, "s", "peer", peer_value, bar)
    assert row.is_met is met
    assert row.verdict == verdict
    assert set(row.as_json()) == KEYS
    assert row.as_json()["ratio"] == (None if peer_value is None else value / peer_value)


ROWS = [
    Row("fast", 1234.5, "ms", "slow", 2.0, Bar(0.5), "a note"),
    Row("fast/alone", 0.01234, "ms", "nobody", None),
]


def test_the_document_takes_the_rows_between_its_markers() -> None:
    text = f"above\n{report.BEGIN}old\n{report.END}below\n"
    once = report.replaced(text, ROWS, ["a machine"])
    assert once.startswith("above\n")
    assert once.endswith("below\n")
    assert "old" not in once
    assert "| fast | 1,234 | 2 | ms | 617 | <= 0.5, NOT met | slow |" in once
    assert "| fast/alone | 0.0123 | - | ms | - |  | nobody |" in once
    assert "- fast: a note\n" in once
    assert "a machine" in once
    assert report.replaced(once, ROWS, ["a machine"]) == once
    with pytest.raises(ValueError, match="lacks the lines"):
        report.replaced("nothing", ROWS, [])


def test_the_document_has_the_markers() -> None:
    report.replaced(report.DOCUMENT.read_text(), ROWS, [])


def test_the_machine_is_described(tmp_path: Path) -> None:
    text = "\n".join(machine.description(tmp_path))
    for word in ("cores", "GiB", "file system", "Python", "mlx", "load average"):
        assert word in text


def test_a_peer_that_cannot_be_installed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_command: object, **_options: object) -> None:
        raise subprocess.CalledProcessError(1, "pip", stderr="no such package")

    monkeypatch.setattr(veloxquant.venv, "create", lambda *_a, **_k: None)
    monkeypatch.setattr(veloxquant.subprocess, "run", fail)
    with pytest.raises(veloxquant.VeloxUnavailable, match="no such package"):
        veloxquant.prepared(tmp_path, lambda *_: None)
    assert not list(tmp_path.rglob("installed"))


def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    """The environment is whole but for the package: its program cannot import it."""
    folder = tmp_path / f"veloxquant-{veloxquant.VERSION}"
    (folder / "bin").mkdir(parents=True)
    (folder / "installed").touch()
    program = folder / "bin" / "python"
    program.write_text("#!/bin/sh\necho nothing works >&2\nexit 3\n")
    program.chmod(0o755)
    peer = veloxquant.prepared(tmp_path, lambda *_: None)
    with pytest.raises(veloxquant.VeloxUnavailable, match="nothing works"):
        peer.seconds_a_vector(1, 8)


def run_bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    run = run_bench(
        "--size", "toy", "--only", "bytes-per-token", "--folder", tmp_path / "new",
        "--json", tmp_path / "rows",
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "rows").read_text())
    assert rows[0]["name"] == "bytes-per-token"
    assert all(set(row) == KEYS for row in rows)
    assert report.figure(rows[0]["value"]) in run.stdout
    assert list((tmp_path / "new").iterdir()) == [], "its stores are gone"


def test_the_list_names_every_benchmark() -> None:
    run = run_bench("--list")
    assert run.returncode == 0
    assert all(name in run.stdout for name in bench.names())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "nonsense"), "invalid choice"),
        (("--rounds", "0"), "at least 1"),
        (("--docs", "--size", "toy"), "full size"),
    ],
)
def test_wrong_use_is_told(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_full_size_is_the_issue_s() -> None:
    assert (FULL.tokens, FULL.layers, FULL.heads, FULL.head_dim) == (32_768, 8, 8, 128)
    assert (FULL.vectors, FULL.new_tokens) == (65_536, 64)
