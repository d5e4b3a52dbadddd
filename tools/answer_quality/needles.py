"""Needles in a haystack: facts hidden in a long text and asked for at its end.

All facts of a haystack are asked for in one pass, one after the other with their answers, so that
an answer counts when every one of its tokens is the model's own first choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tools.answer_quality.texts import manual

DEPTHS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
PEOPLE = ("Tobias", "Mara", "Henry", "Alice", "Boris", "Clara", "David")
NUMBERS = ("48213", "90674", "13758", "26049", "75382", "61927", "34816")


@dataclass(frozen=True)
class Haystack:
    """`tokens` with the positions whose next tokens are each answer's."""

    tokens: list[int]
    answers: list[range]


def haystack(tokenizer: Any, num_tokens: int) -> Haystack:
    """A text of `num_tokens` tokens with a fact at each depth, then questions and answers."""
    hay = tokenizer.encode(manual()[: 12 * num_tokens])[:num_tokens]
    facts = [
        _encoded(tokenizer, f"\n{name}'s secret number is {number}.\n")
        for name, number in zip(PEOPLE, NUMBERS, strict=True)
    ]
    tokens: list[int] = []
    at = 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        end = int(depth * num_tokens)
        tokens += hay[at:end] + fact
        at = end
    tokens += hay[at:]
    answers = []
    for name, number in zip(PEOPLE, NUMBERS, strict=True):
        tokens += _encoded(tokenizer, f"\n{name}'s secret number is")
        answer = _encoded(tokenizer, f" {number}")
        answers.append(range(len(tokens) - 1, len(tokens) - 1 + len(answer)))
        tokens += answer
    return Haystack(tokens, answers)


def padded(stack: Haystack, multiple: int) -> list[int]:
    """Its tokens to a whole number of pages; what follows the last answer changes none."""
    return stack.tokens + stack.tokens[: -len(stack.tokens) % multiple]


def share_found(model: Any, hidden: mx.array, stack: Haystack) -> float:
    """Share of the answers of which every token is the most likely one."""
    found = 0
    for answer in stack.answers:
        logits = model.model.embed_tokens.as_linear(hidden[answer.start : answer.stop])
        chosen: Any = mx.argmax(logits, axis=-1).tolist()
        found += chosen == stack.tokens[answer.start + 1 : answer.stop + 1]
    return found / len(stack.answers)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens
