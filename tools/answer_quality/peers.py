"""Two other packages' TurboQuant caches, in a virtual environment of their own.

Owns its installation and the talk with its process, which writes hidden states to a file.
"""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tools.answer_quality.rows import Bits, Row
from tools.real_model import cache_folder, model_folder

PROGRAM = Path(__file__).with_name("peer_process.py")
PACKAGES = {"mlx-turboquant": "0.0.2", "turboquant-mlx-full": "0.30.0"}
Progress = Callable[[str, int, int], None]


class PeerUnavailable(RuntimeError):
    """It cannot be installed or run here; the message says why."""


def peer_rows(progress: Progress) -> list[Row]:
    """Their 4-bit caches, and the 8/3 that one of them recommends."""
    rows = []
    for package, variant, keys, values in (
        ("mlx-turboquant", "4", 4 + 2 * 16 / 64, 4 + 2 * 16 / 64),
        ("mlx-turboquant", "4+qjl", 5 + 2 * 16 / 64 + 16 / 256, 4 + 2 * 16 / 64),
        ("turboquant-mlx-full", "4/4", 4 + 16 / 64, 4 + 16 / 64),
        ("turboquant-mlx-full", "8/3", 8 + 16 / 64, 3 + 16 / 64),
    ):
        run = _runner(package, variant, progress)
        rows.append(Row(f"TurboQuant {variant}", package, _fixed(Bits(keys, values)), run))
    return rows


def _fixed(bits: Bits) -> Callable[[Any], Bits]:
    return lambda _: bits


def _runner(
    package: str, variant: str, progress: Progress
) -> Callable[[Any, Sequence[int]], mx.array]:
    def run(_model: Any, tokens: Sequence[int]) -> mx.array:
        python = prepared(progress)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "hidden.npy"
            request = {
                "model": str(model_folder()),
                "package": package,
                "variant": variant,
                "tokens": list(tokens),
                "result": str(result),
            }
            done = subprocess.run(
                [python, PROGRAM], input=json.dumps(request), capture_output=True, text=True
            )
            if done.returncode:
                raise PeerUnavailable(done.stderr.strip().splitlines()[-1][:300])
            return mx.array(np.load(result))

    return run


def prepared(progress: Progress) -> Path:
    """The environment's Python; installs it if it isn't there.  PeerUnavailable if that fails."""
    versions = "-".join(PACKAGES.values())
    folder = cache_folder() / f"turboquant-peers-{versions}"
    python, complete = folder / "bin" / "python", folder / "installed"
    if not complete.exists():
        progress(f"installing {' and '.join(PACKAGES)} into {folder}", 0, 1)
        engine = "mlx[cpu]" if platform.system() == "Linux" else "mlx"
        wanted = [f"{name}=={version}" for name, version in PACKAGES.items()]
        pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check"]
        try:
            venv.create(folder, clear=True, with_pip=True)
            command = [str(python), *pip, engine, "mlx-lm", *wanted]
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise PeerUnavailable(f"cannot be installed: {said.strip()[-300:]}") from error
        complete.touch()
    return python
