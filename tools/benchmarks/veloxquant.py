"""VeloxQuant-MLX, a peer, in a virtual environment of its own.

Owns its installation and the talk with its process: its dependencies may not agree with ours.
"""

from __future__ import annotations

import json
import subprocess
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.94.15"
PROGRAM = Path(__file__).with_name("veloxquant_process.py")


class VeloxUnavailable(RuntimeError):
    """It cannot be installed or run here; the message says why."""


@dataclass(frozen=True)
class Velox:
    """An environment in which VeloxQuant-MLX runs."""

    python: Path

    def seconds_a_vector(self, num_vectors: int, head_dim: int) -> float:
        """One append_key and one append_value: the mean of `num_vectors`, in its own process."""
        return self._ask({"num_vectors": num_vectors, "head_dim": head_dim}, "seconds_a_vector")

    def seconds_a_step(self, num_tokens: int, heads: int, queries: int, head_dim: int) -> float:
        """One token appended to each of `heads` heads of `num_tokens`, and attention of `queries`
        queries a head: the median of some steps, in its own process."""
        request = {
            "num_tokens": num_tokens,
            "heads": heads,
            "queries": queries,
            "head_dim": head_dim,
        }
        return self._ask(request, "seconds_a_step")

    def _ask(self, fields: dict[str, int], answer: str) -> float:
        request = json.dumps({"answer": answer, **fields})
        run = subprocess.run([self.python, PROGRAM], input=request, capture_output=True, text=True)
        if run.returncode:
            raise VeloxUnavailable(f"VeloxQuant-MLX failed: {run.stderr.strip()[-300:]}")
        return float(json.loads(run.stdout)[answer])


def prepared(tools_folder: Path | None, progress: Callable[[str, int, int], None]) -> Velox:
    """Installs it below `tools_folder` if it isn't there.  VeloxUnavailable if that fails."""
    if tools_folder is None:
        raise VeloxUnavailable("VeloxQuant-MLX was not asked for")
    folder = tools_folder / f"veloxquant-{VERSION}"
    python = folder / "bin" / "python"
    complete = folder / "installed"
    if not complete.exists():
        progress(f"installing VeloxQuant-MLX {VERSION} into {folder}", 0, 1)
        try:
            venv.create(folder, clear=True, with_pip=True)
            install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*install, *_requirements()], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise VeloxUnavailable(
                f"VeloxQuant-MLX {VERSION} cannot be installed: {said.strip()[-300:]}"
            ) from error
        complete.touch()
    return Velox(python)


def _requirements() -> list[str]:
    """MLX as tqstore asks for it: on Linux its wheel has no back end of its own."""
    import platform

    return [f"VeloxQuant-MLX=={VERSION}", "mlx[cpu]" if platform.system() == "Linux" else "mlx"]
