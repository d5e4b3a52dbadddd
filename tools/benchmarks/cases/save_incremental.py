"""Saving a few new tokens of a long session, against writing the whole session again."""

from __future__ import annotations

from mlx_lm.models.cache import save_prompt_cache

from tools.benchmarks.row import Bar, Row
from tools.benchmarks.synthetic import SESSION
from tools.benchmarks.timing import stopwatch, timed
from tools.benchmarks.workshop import Workshop, settle_disk

NAME = "save-incremental"


def run(workshop: Workshop) -> list[Row]:
    tokens = workshop.sizes.tokens
    rows = [_row(workshop, NAME, tokens)]
    rows += [_row(workshop, f"{NAME}/{n}-tokens", n) for n in (tokens // 2, tokens // 8)]
    return rows


def _row(workshop: Workshop, name: str, num_tokens: int) -> Row:
    session, new_tokens = workshop.session(), workshop.sizes.new_tokens
    prompt_cache = session.prompt_cache(num_tokens)
    file = str(workshop.folder / "incremental.safetensors")
    store, kv_cache = workshop.filled_cache(
        workshop.folder / f"incremental-{num_tokens}", num_tokens
    )
    with store:
        store.save(SESSION, kv_cache, session.tokens[:num_tokens])

        def ours() -> float:
            """Packing the new tokens is part of it; they end one block further each time."""
            first = kv_cache.num_tokens
            settle_disk()
            with stopwatch() as watch:
                session.feed(kv_cache, first, first + new_tokens)
                store.save(SESSION, kv_cache, session.tokens[: first + new_tokens])
            return watch.seconds

        theirs = timed(lambda: save_prompt_cache(file, prompt_cache))
        taken = workshop.measure(
            f"{NAME} at {num_tokens:,} tokens", {"ours": ours, "theirs": theirs}
        )
    return Row(
        name,
        taken["ours"] * 1e3,
        "ms",
        "mlx_lm save_prompt_cache",
        taken["theirs"] * 1e3,
        Bar(1 / 50) if name == NAME else None,
        f"{new_tokens} new tokens packed and saved, on the disk when save returns, after "
        f"{num_tokens:,} tokens, {workshop.sizes.shape}",
    )
