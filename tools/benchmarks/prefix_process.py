"""A process of `second-process-prefix`: computes a prompt and stores it, or finds it stored.

    python -m tools.benchmarks.prefix_process compute|store|find STORE NUM_TOKENS

Prints one JSON object.  `compute` reads the prompt with mlx-lm's own cache, `store` with a tqstore
session that it saves, `find` with another session, which has only the store to take it from.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import mlx.core as mx
import numpy as np

import tqstore
import tqstore.mlx_lm
from tools import real_model

STEP = 512  # tokens a call of the model, the same in every process


def prompt(num_tokens: int) -> list[int]:
    """Tokens of no meaning: what they are has no part in the time they take."""
    found: list[int] = np.random.default_rng(0).integers(1000, 200_000, num_tokens).tolist()
    return found


def read(model: Any, tokens: list[int], cache: Any) -> None:
    """Feeds tokens, up to the scores of the next one."""
    for first in range(0, len(tokens), STEP):
        logits = model(mx.array([tokens[first : first + STEP]]), cache=cache)
        mx.eval(logits, [entry.state for entry in cache])


def computed(model: Any, tokens: list[int]) -> dict[str, Any]:
    cache = model.make_cache()
    started = time.perf_counter()
    read(model, tokens, cache)
    return {"seconds": time.perf_counter() - started, "reused": 0}


def with_session(model: Any, path: str, name: str, tokens: list[int]) -> dict[str, Any]:
    """From opening the store to the next token; the session is saved after that."""
    weights = real_model.model_folder()
    with tqstore.Store.open(path) as store:  # what depends on the weights alone is remembered
        tqstore.mlx_lm.session(store, model, "warm-up", weights=weights)
    started = time.perf_counter()
    with tqstore.Store.open(path) as store:
        chat = tqstore.mlx_lm.session(store, model, name, weights=weights)
        rest = chat.feed(tokens)
        read(model, rest, chat.cache)
        seconds = time.perf_counter() - started
        chat.save()
    return {"seconds": seconds, "reused": chat.reused_tokens}


def main() -> None:
    what, path, num_tokens = sys.argv[1:]
    model, _ = real_model.load()
    mx.eval(model.parameters())
    read(model, prompt(8), model.make_cache())  # the weights are read, the kernels made
    tokens = prompt(int(num_tokens))
    if what == "compute":
        print(json.dumps(computed(model, tokens)))
    else:
        print(json.dumps(with_session(model, path, f"{what}-{time.time_ns()}", tokens)))


if __name__ == "__main__":
    main()
