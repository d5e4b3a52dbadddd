"""Saving a whole session for the first time, durably, against mlx-lm's prompt cache file."""

from __future__ import annotations

import shutil

from mlx_lm.models.cache import save_prompt_cache

from tools.benchmarks.row import Row
from tools.benchmarks.synthetic import SESSION
from tools.benchmarks.timing import stopwatch, timed
from tools.benchmarks.workshop import Workshop, settle_disk

NAME = "save-full"


def run(workshop: Workshop) -> list[Row]:
    num_tokens = workshop.sizes.tokens
    tokens = workshop.session().tokens[:num_tokens]
    prompt_cache = workshop.session().prompt_cache(num_tokens)
    file = str(workshop.folder / "full.safetensors")
    path = workshop.folder / "save-full"

    def ours() -> float:
        """Into a new store each time: what is stored already would not be written again."""
        shutil.rmtree(path, ignore_errors=True)
        store, kv_cache = workshop.filled_cache(path, num_tokens)
        settle_disk()
        with store, stopwatch() as watch:
            store.save(SESSION, kv_cache, tokens)
        return watch.seconds

    theirs = timed(lambda: save_prompt_cache(file, prompt_cache))
    taken = workshop.measure(NAME, {"ours": ours, "theirs": theirs}, rounds=3)
    return [
        Row(
            NAME,
            taken["ours"] * 1e3,
            "ms",
            "mlx_lm save_prompt_cache",
            taken["theirs"] * 1e3,
            note=f"{num_tokens:,} tokens, {workshop.sizes.shape}; pages were packed as the tokens "
            "came; ours is on the disk when save returns",
        )
    ]
