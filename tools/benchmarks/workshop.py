"""What a benchmark works with: sizes, a folder on a real disk, sessions made once, and progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import tqstore
from tools.benchmarks.synthetic import MODEL, SESSION, Sizes, SyntheticSession
from tools.benchmarks.timing import Trial, medians

Progress = Callable[[str, int, int], None]


class Workshop:
    """Everything it makes lies in `folder`.  Sessions are made when first asked for."""

    def __init__(
        self,
        folder: Path,
        sizes: Sizes,
        progress: Progress = lambda _what, _done, _total: None,
        *,
        tools_folder: Path | None = None,
    ) -> None:
        """`tools_folder` is where peers that are packages are installed; None for nowhere."""
        self.folder = folder
        self.sizes = sizes
        self.progress = progress
        self.tools_folder = tools_folder
        self.session = cache(self._session)
        self.saved_store = cache(self._saved_store)

    def measure(
        self, what: str, trials: Mapping[str, Trial], *, rounds: int | None = None
    ) -> dict[str, float]:
        """Median seconds of each trial, in turns; `rounds` is at most that of the sizes."""
        limit = self.sizes.rounds
        return medians(
            trials,
            limit if rounds is None else min(limit, rounds),
            lambda done, total: self.progress(f"{what}: measuring", done, total),
        )

    def _session(self) -> SyntheticSession:
        self.progress(f"making {self.sizes.tokens:,} tokens of keys and values", 0, 1)
        return SyntheticSession(self.sizes, self.sizes.spare_tokens)

    def filled_cache(self, path: Path, num_tokens: int) -> tuple[tqstore.Store, tqstore.KVCache]:
        """A store at `path` and a cache of it with the first tokens; nothing is saved yet."""
        store = tqstore.Store.open(path)
        kv_cache = store.new_cache(self.sizes.spec, model=MODEL)
        self.progress(f"packing {num_tokens:,} tokens", 0, 1)
        self.session().fill(kv_cache, num_tokens)
        return store, kv_cache

    def _saved_store(self, num_tokens: int) -> Path:
        """The folder of a store that holds one session of that many tokens, saved once."""
        path = self.folder / f"saved-{num_tokens}"
        store, kv_cache = self.filled_cache(path, num_tokens)
        with store:
            self.progress(f"saving {num_tokens:,} tokens", 0, 1)
            store.save(SESSION, kv_cache, self.session().tokens[:num_tokens])
        return path


def settle_disk() -> None:
    """Writes out what others left behind, so that the next fsync pays only for its own."""
    os.sync()


def nbytes_below(folder: Path) -> int:
    """Bytes of every file below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
