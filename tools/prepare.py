"""Makes or refreshes the virtual environment and prints its Python; runs on the bare interpreter.

Standard library only.  Owns the folder `.venv` (or `TQSTORE_VENV`): what is installed there is
remembered in a stamp, so a second run costs nothing until pyproject.toml changes.  Two runs at
once take turns.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_EXTRAS = "dev,mlx-lm,model"


def environment_folder() -> Path:
    return ROOT / os.environ.get("TQSTORE_VENV", ".venv")


def wanted_stamp(extras: str) -> str:
    """Stands for all that decides what must be installed."""
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    return f"{hashlib.sha256(pyproject).hexdigest()} [{extras}]\n"


def works(python: Path) -> bool:
    """Whether the environment's interpreter still runs: the one it was made from may be gone."""
    check = [str(python), "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    try:
        return subprocess.run(check, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def install(python: Path, extras: str) -> None:
    """pip's own progress bars are shown where somebody looks."""
    quiet = [] if sys.stderr.isatty() else ["-q"]
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    subprocess.run(
        [*pip, "-e", f"{ROOT}[{extras}]"], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr
    )


@contextmanager
def taking_turns() -> Iterator[None]:
    """The lock is the project's folder itself, so that no file is left behind."""
    descriptor = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def prepare() -> Path:
    """The environment's Python, with everything installed."""
    folder = environment_folder()
    extras = os.environ.get("TQSTORE_EXTRAS", DEFAULT_EXTRAS)
    python = folder / "bin" / "python"
    stamp = folder / "installed.stamp"
    with taking_turns():
        if not works(python):
            print(f"making {folder}", file=sys.stderr)
            venv.create(folder, clear=True, symlinks=True, with_pip=True)
        wanted = wanted_stamp(extras)
        if not stamp.exists() or stamp.read_text() != wanted:
            print(f"installing tqstore[{extras}] into {folder}", file=sys.stderr)
            stamp.unlink(missing_ok=True)
            install(python, extras)
            stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    try:
        print(prepare())
    except subprocess.CalledProcessError as error:
        sys.exit(f"pip could not install tqstore's dependencies (exit {error.returncode})")
