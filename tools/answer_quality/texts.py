"""What the model reads: prose, reference prose and a program, cut to whole pages."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

STORY = Path(__file__).with_name("story.txt")
NUM_TOKENS = 1024


@dataclass(frozen=True)
class Text:
    name: str
    tokens: list[int]

    @property
    def digest(self) -> str:
        """Stands for the tokens: Python's own texts differ from version to version."""
        return hashlib.sha256(repr(self.tokens).encode()).hexdigest()[:16]


def manual() -> str:
    """Python's language reference as the interpreter carries it."""
    return "\n".join(topics[name] for name in sorted(topics))


def texts(tokenizer: Any, num_tokens: int = NUM_TOKENS) -> Sequence[Text]:
    """Two English texts and one program, each of exactly `num_tokens` tokens."""
    raw = {
        "story": STORY.read_text(),
        "manual": manual(),
        "code": Path(argparse.__file__).read_text().partition("\nimport ")[2],
    }
    found = {name: tokenizer.encode(text[: 12 * num_tokens]) for name, text in raw.items()}
    for name, tokens in found.items():
        if len(tokens) < num_tokens:
            raise ValueError(f"the text {name} has {len(tokens)} tokens, not {num_tokens}")
    return [Text(name, tokens[:num_tokens]) for name, tokens in found.items()]
