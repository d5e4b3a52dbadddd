"""What all commands have in common: exit codes, one-line errors, and what they never load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tqstore
from tests.cli.conftest import Ran, Run, the_error
from tqstore import errors
from tqstore.cli.app import one_line
from tqstore.cli.printable import counted

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    ["ls"],
    ["ls", "--packs"],
    ["inspect", "fork"],
    ["inspect", "fork", "-p", "0"],
    ["verify"],
)


def python(program: str, *arguments: object, cwd: Path = ROOT, **environment: str) -> Ran:
    """Runs `program` in a fresh interpreter as the console script would run `main`."""
    run = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ran(run.returncode, run.stdout, run.stderr)


MAIN = "from tqstore.cli import main; main()"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_it_says_what_to_install(missing: str) -> None:
    ran = python(f"import sys; sys.modules[{missing!r}] = None; {MAIN}", "ls")
    assert ran.code == 2
    assert "pip install '.[cli]'" in the_error(ran)
    assert ran.out == ""


def test_commands_work_where_mlx_does_not(chats: Path) -> None:
    program = f"""
import sys
sys.modules.update(mlx=None, mlx_lm=None, zarr=None)
from tqstore.cli import main
for command in {COMMANDS!r}:
    sys.argv = ["tqstore", "--store", {str(chats)!r}, *command]
    try:
        main()
    except SystemExit as leaving:
        assert leaving.code == 0, (command, leaving.code)
"""
    ran = python(program)
    assert (ran.code, ran.err) == (0, "")
    for said in ("3 sessions", "packs,", "CHECKPOINT", "key_codes", "0 errors"):
        assert said in ran.out


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    report = "; sys.stderr.write(' '.join(sorted({m.split('.')[0] for m in sys.modules})))"
    program = f"import sys, atexit; atexit.register(lambda: exec({report[2:]!r})); {MAIN}"
    ran = python(program, *arguments)
    assert ran.code == 0
    loaded = set(ran.err.split())
    assert "typer" in loaded
    assert loaded.isdisjoint({"mlx", "mlx_lm", "zarr", "numpy", "msgpack"})


@pytest.mark.parametrize("module", ["tqstore", "tqstore.cli"])
def test_it_runs_as_a_module(chats: Path, module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", module, "ls"],
        cwd=ROOT,
        env={**os.environ, "TQSTORE_HOME": str(chats)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "chat one" in run.stdout


def test_its_version(run: Run) -> None:
    assert run("--version").out == f"tqstore {tqstore.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--nonsense"],
        ["ls", "--nonsense"],
        ["ls", "--store", ""],
        ["inspect"],
        ["inspect", "x", "--layer", "1"],
        ["gc", "--grace", "-1"],
        [],
    ],
)
def test_wrong_usage(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    if arguments:
        assert the_error(ran).endswith("--help`")
    assert "Usage" in ran.err + ran.out


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_every_error_is_one_line_with_its_own_code(
    run: Run, chats: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    if not issubclass(kind, errors.TqStoreError):
        pytest.skip("not an error of ours")
    given = {errors.Corrupt: ("a file", "torn"), errors.Incompatible: ("seed", 1, 2)}
    error = kind(*given.get(kind, ("broken\nin two",)), doing="testing \x1b[1m", remedy="Do it")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tqstore.cli.catalog_view.show_sessions", fail)
    ran = run("ls", "--store", chats)
    assert ran.code == kind.exit_code >= 10
    line = the_error(ran)
    assert line.startswith(r"tqstore: testing \x1b[1m: ")
    assert line.endswith(". Do it")


def test_exit_codes_are_distinct() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = [kind.exit_code for kind in kinds if issubclass(kind, errors.TqStoreError)]
    assert len(codes) == len(set(codes))


def test_one_line_of_many() -> None:
    assert one_line(errors.NotFound("a\n  b", doing="c", remedy="d")) == "c: a b. d"


def test_an_interrupt_is_quiet(chats: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tqstore.store.page_store.PageStore.verify", interrupt)
    ran = run("verify", "--store", chats)
    assert ran.code == 130
    assert ran.err.strip() == ""


def test_a_real_interrupt_while_verifying(chats: Path) -> None:
    program = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
from tqstore.store.page_store import PageStore
def verify(store):
    os.kill(os.getpid(), signal.SIGINT)
    yield from ()
PageStore.verify = verify
{MAIN}
"""
    ran = python(program, "verify", "--store", chats)
    assert ran.code == 130
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("command", [["ls"], ["inspect", "fork", "-p", "0"], ["verify", "--json"]])
def test_a_reader_that_leaves_is_no_error(chats: Path, command: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tqstore", "--store", str(chats), *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert said == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_bug_of_ours_is_not_mistaken_for_findings(chats: Path) -> None:
    program = f"""
from tqstore.store.page_store import PageStore
PageStore.verify = lambda store: [][0]
{MAIN}
"""
    ran = python(program, "verify", "--store", chats)
    assert ran.code == 10
    assert "IndexError" in ran.err
    assert "bug in tqstore" in ran.err


def test_pipes_cut_nothing_off(chats: Path) -> None:
    ran = python(MAIN, "ls", "--packs", "--store", chats, COLUMNS="40")
    names = [str(file.relative_to(chats)) for file in chats.glob("ns/*/pages/*/c.*")]
    assert all(name in ran.out for name in names)


def test_a_terminal_of_ascii_gets_ascii(chats: Path) -> None:
    ran = python(MAIN, "inspect", "fork", "-p", 0, "--store", chats, PYTHONIOENCODING="ascii")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.isascii()
    assert "#" in ran.out


def test_one_is_not_many() -> None:
    told = [counted(count, "pack") for count in (0, 1, 2, 1234)]
    assert told == ["0 packs", "1 pack", "2 packs", "1,234 packs"]


def test_tables_in_a_pipe_end_without_blanks(chats: Path, run: Run) -> None:
    for command in (["ls"], ["stats"], ["inspect", "fork"], ["inspect", "fork", "-p", "0"]):
        lines = run(*command, "--store", chats).out.splitlines()
        assert len(lines) > 3
        assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("damage", [b"", b"x" * 200])
def test_a_damaged_format_file_says_what_to_do(store_dir: Path, run: Run, damage: bytes) -> None:
    tqstore.Store.open(store_dir).close()
    sound = (store_dir / "FORMAT").read_bytes()
    (store_dir / "FORMAT").write_bytes(damage)
    for command in ("ls", "verify", "gc"):
        ran = run(command, "--store", store_dir)
        assert ran.code == 15
        assert the_error(ran).startswith(f"tqstore: opening a store: {store_dir / 'FORMAT'}: ")
        assert "Put a copy of this file back" in ran.err
    (store_dir / "FORMAT").write_bytes(sound)
