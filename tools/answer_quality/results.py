"""Figures measured so far, in one JSON file that is rewritten after each.

A figure is kept for the text it is of and for the code that made it: change either and it is
measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What decides the bytes of a page and how they are read.
SOURCES = (
    *("tqstore/codec_spec.py", "tqstore/spec.py", "tqstore/layer_cache.py"),
    *("tqstore/paging/page_records.py", "tools/answer_quality/forward.py"),
)


def code_digest() -> str:
    """Stands for the code under measurement."""
    files = [ROOT / name for name in SOURCES] + sorted((ROOT / "tqstore" / "quant").glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """`rows[name]` describes a row and holds its figures by text, `choices[text]` by policy.

    A file that is not there yet is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.machine: list[str] = found.get("machine", [])
        self.rows: dict[str, dict[str, Any]] = found.get("rows", {})
        self.choices: dict[str, dict[str, Any]] = found.get("choices", {})

    def get(self, row: str, what: str, version: str) -> dict[str, Any] | None:
        """The figures of a row for one text, None if they are of another version."""
        figures: dict[str, Any] | None = self.rows.get(row, {}).get(what)
        return figures if figures and figures["version"] == version else None

    def put(self, row: str, described: dict[str, Any], what: str, figures: dict[str, Any]) -> None:
        self.rows.setdefault(row, {}).update(described)
        self.rows[row][what] = figures
        self._write()

    def put_choices(self, text: str, version: str, policies: dict[str, dict[str, float]]) -> None:
        """Figures of choices.py for one text."""
        self.choices[text] = {"version": version, "policies": policies}
        self._write()

    def keep_only(self, rows: list[str]) -> None:
        """Forgets rows that are no longer measured, and gives the others this order."""
        self.rows = {name: self.rows[name] for name in rows if name in self.rows}
        self._write()

    def _write(self) -> None:
        beside = self.path.with_name(self.path.name + ".tmp")
        content = {"machine": self.machine, "rows": self.rows, "choices": self.choices}
        beside.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(beside, self.path)
