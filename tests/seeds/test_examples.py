"""The examples of docs/seeds.md and of the docstrings run, and say what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tqstore.seeds import esml, velox

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "seeds.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("example", "expected"),
    list(zip(EXAMPLES, ({"output": (128,)}, {"keys": (1, 128)}), strict=True)),
    ids=["velox", "esml"],
)
def test_the_documents_examples_run(example: str, expected: dict[str, tuple[int, ...]]) -> None:
    names: dict[str, object] = {}
    exec(example, names)
    assert {name: names[name].shape for name in expected} == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [velox, esml], ids=lambda module: module.__name__)
def test_docstrings_run(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0
