"""Bytes on disk of a saved session a token, every file of the store counted."""

from __future__ import annotations

from tools.benchmarks.row import Bar, Row
from tools.benchmarks.workshop import Workshop, nbytes_below

NAME = "bytes-per-token"


def run(workshop: Workshop) -> list[Row]:
    sizes = workshop.sizes
    return [
        _row(workshop, NAME, sizes.tokens),
        _row(workshop, f"{NAME}/{sizes.tokens // 8}-tokens", sizes.tokens // 8),
    ]


def _row(workshop: Workshop, name: str, num_tokens: int) -> Row:
    on_disk = nbytes_below(workshop.saved_store(num_tokens))
    return Row(
        name,
        on_disk / num_tokens,
        "B",
        "keys and values in float16",
        workshop.sizes.dense_nbytes_per_token,
        Bar(0.42),
        f"{num_tokens:,} tokens, {workshop.sizes.shape}, prod4 keys and int8 values; "
        "the exact tail, headers, padding, index and checkpoint are in it",
    )
