"""A Hugging Face tokenizer from a Gemma GGUF's vocabulary; nothing here knows about weights.

GGUF keeps a SentencePiece vocabulary (tokens, scores, types) but no merges.  SentencePiece's BPE
joins the neighbours whose union has the best score, so every split of a token into two tokens is
a merge, and merges rank by the score of what they make.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

# llama.cpp's token types
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPACE = "▁"


@dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece vocabulary: one token, score and type per id."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    bos: int
    eos: int
    unk: int
    pad: int


def merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every split of a normal token into two normal tokens, best score of the whole first.

    Control, byte and user-defined tokens are never joined from parts nor parts themselves.
    """
    normal = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == NORMAL
    }
    ranked = []
    for token, index in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append(
                    (-vocabulary.scores[index], index, normal[left], normal[right], left, right)
                )
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def build(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer: spaces become `▁`, unknown characters become byte tokens, bos goes first."""
    tokens = vocabulary.tokens
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges(vocabulary),
            unk_token=tokens[vocabulary.unk],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # Splits only on what the normalizer has already removed: merges cross word borders.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = tokens[vocabulary.bos]
    tokenizer.post_processor = TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, vocabulary.bos)]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, vocabulary.types, strict=True)
            if kind == CONTROL
        ]
    )
    # Matched after normalization, so that runs of spaces (`▁▁`) are found as well.
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=True, special=False)
            for token, kind in zip(tokens, vocabulary.types, strict=True)
            if kind == USER_DEFINED
        ]
    )
    return tokenizer


def save(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as transformers and mlx-lm read them."""
    build(vocabulary).save(str(folder / "tokenizer.json"))
    tokens = vocabulary.tokens
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[vocabulary.bos],
        "eos_token": tokens[vocabulary.eos],
        "unk_token": tokens[vocabulary.unk],
        "pad_token": tokens[vocabulary.pad],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
