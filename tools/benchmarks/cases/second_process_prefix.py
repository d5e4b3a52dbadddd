"""A prompt that another process has stored, against computing it again, on the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools import real_model
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.workshop import Workshop

NAME = "second-process-prefix"


def run(workshop: Workshop) -> list[Row]:
    """Nothing without the `model` extra.  Every part runs once, in a process of its own."""
    if not real_model.is_available():
        return []
    real_model.model_folder(workshop.progress)
    num_tokens = workshop.sizes.prefix_tokens
    path = workshop.folder / NAME
    told: dict[str, dict[str, Any]] = {}
    for done, what in enumerate(("compute", "store", "find")):
        workshop.progress(f"{NAME}: {what} {num_tokens:,} tokens", done, 3)
        told[what] = _process(what, path, num_tokens)
    reused = told["find"]["reused"]
    assert reused >= max(1, num_tokens - 2 * 64), f"only {reused} of {num_tokens} were found"
    seconds = {what: answer["seconds"] for what, answer in told.items()}
    return [
        Row(
            NAME,
            seconds["find"],
            "s",
            "computing it, mlx-lm's cache",
            seconds["compute"],
            Bar(1 / 20),
            f"Gemma 3 270M, {num_tokens:,} tokens, of which {reused:,} came from the pages of a "
            "process that has ended: from opening the store to the next token's scores",
        ),
        Row(
            f"{NAME}/storing",
            seconds["store"],
            "s",
            "computing it, mlx-lm's cache",
            seconds["compute"],
            note="what the first process took to compute and pack it; saving not counted",
        ),
    ]


def _process(what: str, path: Path, num_tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.benchmarks.prefix_process", what, path, num_tokens]
    ran = subprocess.run(map(str, command), stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer
