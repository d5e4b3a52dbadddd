"""The tokenizer rebuilt from a SentencePiece vocabulary, against SentencePiece's own rule."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import pytest

pytest.importorskip("tokenizers")

from tools.gemma_tokenizer import CONTROL, NORMAL, SPACE, USER_DEFINED, Vocabulary, build, merges

BYTE = 6


def vocabulary(words: list[str], user_defined: tuple[str, ...] = ()) -> Vocabulary:
    """Control tokens, user-defined ones, all bytes, then `words`, the best score first."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    return Vocabulary(
        tokens=[*control, *user_defined, *octets, *words],
        scores=[-1000.0] * (4 + len(user_defined) + 256) + [-float(n) for n in range(len(words))],
        types=[CONTROL] * 4
        + [USER_DEFINED] * len(user_defined)
        + [BYTE] * 256
        + [NORMAL] * len(words),
        pad=0,
        eos=1,
        bos=2,
        unk=3,
    )


def sentencepiece(text: str, of: Vocabulary) -> list[str]:
    """The rule itself: user-defined tokens first, then always join the best-scored neighbours."""
    normal = {t: s for t, s, k in zip(of.tokens, of.scores, of.types, strict=True) if k == NORMAL}
    fixed = [t for t, k in zip(of.tokens, of.types, strict=True) if k in (CONTROL, USER_DEFINED)]
    fixed_lengths = sorted({len(token) for token in fixed}, reverse=True)
    fixed_set = set(fixed)
    pieces: list[str] = []
    run = ""
    text = text.replace(" ", SPACE)
    at = 0
    while at < len(text):
        token = next(
            (text[at : at + n] for n in fixed_lengths if text[at : at + n] in fixed_set), ""
        )
        if token:
            pieces += [*joined(run, normal), token]
            run = ""
        else:
            run += text[at]
        at += len(token) or 1
    return [*pieces, *joined(run, normal)]


def joined(run: str, normal: dict[str, float]) -> Iterator[str]:
    parts: list[str | None] = list(run)
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int) -> None:
        right = left + 1
        while right < len(parts) and parts[right] is None:
            right += 1
        if right < len(parts):
            whole = f"{parts[left]}{parts[right]}"
            if whole in normal:
                heapq.heappush(queue, (-normal[whole], left, right, whole))

    for left in range(len(parts) - 1):
        offer(left)
    while queue:
        _, left, right, whole = heapq.heappop(queue)
        if parts[left] is None or parts[right] is None or f"{parts[left]}{parts[right]}" != whole:
            continue
        if any(part is not None for part in parts[left + 1 : right]):
            continue
        parts[left], parts[right] = whole, None
        offer(left)
        before = left - 1
        while before >= 0 and parts[before] is None:
            before -= 1
        if before >= 0:
            offer(before)
    for part in parts:
        if part is None:
            continue
        if part in normal:
            yield part
        else:
            yield from (f"<0x{octet:02X}>" for octet in part.encode())


WORDS = ["he", "ll", "llo", "hello", f"{SPACE}w", "or", "ld", "hell", *"helowrd", SPACE]


def test_merges_rank_by_the_score_of_the_whole() -> None:
    made = ["".join(pair) for pair in merges(vocabulary(WORDS))]
    assert made == ["he", "ll", "llo", "hello", "hello", f"{SPACE}w", "or", "ld", "hell"]


def test_control_and_user_defined_tokens_take_no_part_in_merges() -> None:
    assert merges(vocabulary([*"<bos>", "<b", "os>", "<bos"], user_defined=("\n", "\n\n"))) == [
        ("<", "b")
    ]


@pytest.mark.parametrize(
    "text",
    ["hello world", "  hello", "helloworld", "hell\n\n\nold", "é hello ü", "🦙", "lllll", " ", "a"],
)
def test_the_rule_is_sentencepieces(text: str) -> None:
    of = vocabulary(WORDS, user_defined=("\n", "\n\n", SPACE * 2))
    encoded = build(of).encode(text)
    assert encoded.tokens == ["<bos>", *sentencepiece(text, of)]


@pytest.mark.parametrize("text", ["hello world", " two  spaces ", "é🦙\n\n", "x<eos>y", ""])
def test_text_comes_back(text: str) -> None:
    tokenizer = build(vocabulary(WORDS, user_defined=("\n", "\n\n", SPACE * 2)))
    ids = tokenizer.encode(text).ids
    assert ids[0] == 2
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text
