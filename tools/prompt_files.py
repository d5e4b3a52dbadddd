"""Prompt-cache files as different versions of mlx-lm save them: the fixtures of tests/mlx_lm.

    pip install mlx-lm==0.28.0 && python tools/prompt_files.py tests/data/prompt_files

Runs without tqstore, in an environment of the mlx-lm version whose files are wanted, and writes
`<version>-<kind>.safetensors` for every kind that version can save.  The numbers follow from their
position alone (`numbers`), so that a test knows them without the version that saved them.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as caches

HEADS, DIM, QUANTIZED_DIM = 2, 4, 32
TOKENS = 21
MAX_SIZE, KEEP = 8, 2
STEP = 32  # rows that caches grow by, fewer than by default: for small files


def numbers(layer: int, side: int, tokens: int, dim: int = DIM) -> mx.array:
    """[1, HEADS, tokens, dim] float16, all different within a head and exact in float16."""
    token = mx.arange(tokens).reshape(1, 1, tokens, 1)
    head = mx.arange(HEADS).reshape(1, HEADS, 1, 1)
    place = mx.arange(dim).reshape(1, 1, 1, dim)
    return (token + head / 2 - place / 32 + 32 * side - 8 * layer).astype(mx.float16)


def feed(cache: Any, layer: int, chunks: list[int], dim: int = DIM) -> Any:
    """Appends the numbers of a layer in chunks of these lengths."""
    cache.step = STEP
    total = sum(chunks)
    keys, values = numbers(layer, 0, total, dim), numbers(layer, 1, total, dim)
    first = 0
    for length in chunks:
        part = slice(first, first + length)
        cache.update_and_fetch(keys[:, :, part], values[:, :, part])
        first += length
    return cache


def arrays_cache() -> Any:
    """Two arrays of a state that is not by position, by whatever name the version has."""
    made = caches.MambaCache() if hasattr(caches, "MambaCache") else caches.ArraysCache(size=2)
    made[0] = mx.arange(12, dtype=mx.float32).reshape(1, 3, 4)
    made[1] = -mx.arange(6).reshape(1, 6).astype(mx.bfloat16)
    return made


def kinds() -> dict[str, list[Any]]:
    """Lists of caches by the name of their file."""
    rotating = caches.RotatingKVCache
    quantized = caches.QuantizedKVCache(group_size=32, bits=8)
    trimmed = feed(caches.KVCache(), 1, [TOKENS + 3])
    trimmed.trim(3)
    return {
        "full": [feed(caches.KVCache(), 0, [TOKENS]), trimmed],
        "ring": [
            feed(rotating(max_size=MAX_SIZE), 0, [1] * TOKENS),
            feed(caches.KVCache(), 1, [TOKENS]),
        ],
        "ring-kept": [feed(rotating(max_size=MAX_SIZE, keep=KEEP), 0, [5] + [1] * (TOKENS - 5))],
        "ring-prefilled": [feed(rotating(max_size=MAX_SIZE), 0, [4, TOKENS - 4])],
        "ring-short": [feed(rotating(max_size=64, keep=KEEP), 0, [TOKENS - 1, 1])],
        "quantized": [feed(quantized, 0, [TOKENS], QUANTIZED_DIM)],
        "hybrid": [arrays_cache(), feed(caches.KVCache(), 1, [TOKENS])],
        "list": [caches.CacheList(feed(caches.KVCache(), 0, [TOKENS]), arrays_cache())],
        "chunked": [chunked(), feed(caches.KVCache(), 1, [TOKENS])],
    }


def chunked() -> Any:
    made = feed(caches.ChunkedKVCache(chunk_size=MAX_SIZE), 0, [TOKENS])
    made.maybe_trim_front()
    return made


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, made in kinds().items():
        path = folder / f"{version('mlx-lm')}-{kind}.safetensors"
        metadata = {"model": "a/b", "tokenizer_config": "{}", "with.dots": "x"}
        caches.save_prompt_cache(str(path), made, metadata)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
