"""tools/bootstrap and tools/prepare.py: which Python is taken, and when something is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import prepare

ROOT = Path(__file__).resolve().parents[2]


def a_project(folder: Path) -> Path:
    """A copy of the two programs beside a project of its own, so that nothing real is touched."""
    (folder / "tools").mkdir(parents=True)
    for name in ("bootstrap", "prepare.py"):
        shutil.copy(ROOT / "tools" / name, folder / "tools" / name)
    (folder / "pyproject.toml").write_text("[project]\n")
    return folder


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def bootstrap(
    project: Path, path: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the project's bootstrap with the programs of `path` and the basic ones of the system."""
    path.mkdir(exist_ok=True)
    for name in ("sh", "dirname", "uname", "awk", "ldconfig", "env", "cat"):
        found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if found and not (path / name).exists():
            (path / name).symlink_to(found)
    return subprocess.run(
        [project / "tools" / "bootstrap", *arguments],
        env={"PATH": str(path), "HOME": str(project), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_python_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bin"
    path.mkdir()
    program(path, "python3.12", "echo command not found >&2; exit 127")  # as version shims do
    run = bootstrap(a_project(tmp_path / "project"), path, "-c", "pass")
    assert run.returncode != 0
    assert "needs Python 3.11 or newer" in run.stderr


def test_a_shim_that_fails_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "bin"
    path.mkdir()
    program(path, "python3.13", "exit 127")
    program(path, "python3.12", f'exec "{sys.executable}" "$@"')
    project = a_project(tmp_path / "project")
    # Stands for prepare.py: the Python it ran with is the one to be used.
    (project / "tools" / "prepare.py").write_text("import sys\nprint(sys.executable)\n")
    run = bootstrap(project, path, "-c", "import sys; print(sys.argv[1:])", "two words", "x")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "['two words', 'x']\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Apple's MLX has its own BLAS")
def test_openblas_goes_first_with_its_own_settings(tmp_path: Path) -> None:
    project = a_project(tmp_path / "project")
    (project / "tools" / "prepare.py").write_text("import sys\nprint(sys.executable)\n")
    path = tmp_path / "bin"
    path.mkdir()
    program(path, "python3", f'exec "{sys.executable}" "$@"')
    show = (
        "import json, os; names = ('LD_PRELOAD', 'OPENBLAS_CORETYPE');"
        "print(json.dumps([os.environ.get(name) for name in names]))"
    )
    run = bootstrap(project, path, "-c", show, OPENBLAS_CORETYPE="Haswell")
    assert run.returncode == 0, run.stderr
    preloaded, core = json.loads(run.stdout)
    if preloaded is None:
        assert "apt-get install libopenblas0-pthread" in run.stderr
    else:
        assert Path(preloaded).name.startswith("libopenblas")
        assert Path(preloaded).exists()
        assert core is None


def test_the_stamp_follows_the_project_and_the_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "ROOT", a_project(tmp_path / "project"))
    first = prepare.wanted_stamp("test")
    assert prepare.wanted_stamp("test") == first
    assert prepare.wanted_stamp("test,model") != first
    (tmp_path / "project" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert prepare.wanted_stamp("test") != first


def test_a_python_that_is_gone_does_not_work(tmp_path: Path) -> None:
    assert prepare.works(Path(sys.executable))
    assert not prepare.works(tmp_path / "python")
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    assert not prepare.works(dangling)


def test_it_installs_once_and_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "ROOT", a_project(tmp_path / "project"))
    monkeypatch.delenv("TQSTORE_VENV", raising=False)
    monkeypatch.delenv("TQSTORE_EXTRAS", raising=False)
    made: list[Path] = []
    installed: list[str] = []
    failing = True

    def create(folder: Path, **_options: object) -> None:
        (folder / "bin").mkdir(parents=True)
        os.symlink(sys.executable, folder / "bin" / "python")
        made.append(folder)

    def install(_python: Path, extras: str) -> None:
        if failing:
            raise subprocess.CalledProcessError(1, "pip")
        installed.append(extras)

    monkeypatch.setattr(prepare.venv, "create", create)
    monkeypatch.setattr(prepare, "install", install)
    with pytest.raises(subprocess.CalledProcessError):
        prepare.prepare()
    failing = False
    python = prepare.prepare()
    assert prepare.prepare() == python
    assert made == [tmp_path / "project" / ".venv"]
    assert installed == [prepare.DEFAULT_EXTRAS]
    (tmp_path / "project" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    prepare.prepare()
    assert len(installed) == 2
