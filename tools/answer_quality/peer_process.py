"""Runs inside the peers' environment: the model over a text with a peer's cache.

Imports nothing of tqstore.  Reads {model, package, variant, tokens, result} from standard input and
writes hidden states, float32 [tokens, hidden], to the file `result`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import create_attention_mask


def mlx_turboquant(model: Any, variant: str) -> list[Any]:
    from mlx_turboquant.kv_cache import make_prompt_cache  # type: ignore[import-not-found]

    bits, _, option = variant.partition("+")
    cache: list[Any] = make_prompt_cache(model, kv_bits=int(bits), qjl=option == "qjl")
    return cache


def turboquant_mlx_full(model: Any, variant: str) -> list[Any]:
    from turboquant_mlx.layers.polar_kv_cache import (  # type: ignore[import-not-found]
        TurboQuantKVCache,
    )

    class Windowed(TurboQuantKVCache):  # type: ignore[misc]
        """Its own make_mask knows no windows when it is used for all layers of such a model."""

        def make_mask(
            self, num_new: int, return_array: bool = False, window_size: int | None = None
        ) -> Any:
            return create_attention_mask(num_new, self.offset, return_array, window_size)

    k_bits, v_bits = map(int, variant.split("/"))
    return [Windowed(k_bits=k_bits, v_bits=v_bits) for _ in model.layers]


MAKERS = {"mlx-turboquant": mlx_turboquant, "turboquant-mlx-full": turboquant_mlx_full}


def main() -> None:
    request = json.load(sys.stdin)
    model = mlx_lm.load(request["model"])[0]
    cache = MAKERS[request["package"]](model, request["variant"])
    hidden = model.model(mx.array([request["tokens"]]), cache)[0].astype(mx.float32)
    np.save(request["result"], np.array(hidden))


if __name__ == "__main__":
    main()
