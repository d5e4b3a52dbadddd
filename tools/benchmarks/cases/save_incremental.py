"""Saving a few new tokens of a long session, against writing the whole session again."""

from __future__ import annotations

from contextlib import ExitStack

from mlx_lm.models.cache import save_prompt_cache

from tools.benchmarks.row import Bar, Row
from tools.benchmarks.synthetic import SESSION
from tools.benchmarks.timing import Trial, stopwatch, timed
from tools.benchmarks.workshop import Workshop, settle_disk

NAME = "save-incremental"


class GrowingSession:
    """A saved session that each `save` makes longer, by the same number of new tokens."""

    def __init__(self, workshop: Workshop, num_tokens: int) -> None:
        self.session = workshop.session()
        self.new_tokens = workshop.sizes.new_tokens
        path = workshop.folder / f"growing-{num_tokens}"
        self.store, self.cache = workshop.filled_cache(path, num_tokens)
        self.packing_seconds: list[float] = []
        self._save()

    def _save(self) -> None:
        self.store.save(SESSION, self.cache, self.session.tokens[: self.cache.num_tokens])

    def save(self) -> float:
        """Seconds of saving what was appended, and so packed, just before."""
        first = self.cache.num_tokens
        with stopwatch() as packing:
            self.session.feed(self.cache, first, first + self.new_tokens)
        self.packing_seconds.append(packing.seconds)
        settle_disk()
        with stopwatch() as saving:
            self._save()
        return saving.seconds

    def save_with_packing(self) -> float:
        return self.save() + self.packing_seconds[-1]


def run(workshop: Workshop) -> list[Row]:
    sizes = workshop.sizes
    whole = sizes.tokens
    file = str(workshop.folder / "incremental.safetensors")
    prompt_cache = workshop.session().prompt_cache(whole)
    with ExitStack() as stores:
        growing = {n: GrowingSession(workshop, n) for n in (whole, whole // 2, whole // 8)}
        for session in growing.values():
            stores.enter_context(session.store)
        trials: dict[str, Trial] = {
            "ours": growing[whole].save,
            "packed and saved": growing[whole].save_with_packing,
            "theirs": timed(lambda: save_prompt_cache(file, prompt_cache)),
        }
        taken = workshop.measure(f"{NAME} at {whole:,} tokens", trials)
        lengths = workshop.measure(
            f"{NAME} at {len(growing)} lengths",
            {str(n): session.save for n, session in growing.items()},
        )
    note = (
        f"{sizes.new_tokens} new tokens of {whole:,}, {sizes.shape}; on the disk when save returns"
    )
    peer = "mlx_lm save_prompt_cache"
    return [
        _row(NAME, taken["ours"], peer, taken["theirs"], note, Bar(1 / 50)),
        _row(
            f"{NAME}/with-packing",
            taken["packed and saved"],
            peer,
            taken["theirs"],
            "appending and encoding the new tokens counted too",
        ),
    ] + [
        _row(
            f"{NAME}/{n}-tokens",
            lengths[str(n)],
            f"the same at {whole:,} tokens",
            lengths[str(whole)],
            "the cost should not grow with the session",
        )
        for n in growing
        if n != whole
    ]


def _row(
    name: str, ours: float, peer: str, theirs: float, note: str, bar: Bar | None = None
) -> Row:
    return Row(name, ours * 1e3, "ms", peer, theirs * 1e3, bar, note)
