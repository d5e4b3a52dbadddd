"""Races that tools/soak has found, made to happen every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.store.synthetic import chain, check_readable, packs, save
from tqstore.store.files import Files
from tqstore.store.gc_plan import GcOptions
from tqstore.store.page_store import PageStore

WIDE = chain(6)
NOW = GcOptions(grace_seconds=0)


class Meddling(Files):
    """Before the first pack is opened, or the folder of packs was listed, something happens."""

    def __init__(self, at: str, then: Callable[[], object]) -> None:
        self._at = at
        self._then: Callable[[], object] | None = then

    def _meddle(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def open_file(self, folder: int, name: str) -> int:
        if self._at == "open_file" and name.startswith("c."):
            self._meddle()
        return super().open_file(folder, name)

    def names(self, folder: int) -> list[str]:
        found = super().names(folder)
        if self._at == "names" and any(name.startswith("c.") for name in found):
            self._meddle()
            # As a listing in several calls may be: without what came, without what went.
            left = set(super().names(folder))
            return [name for name in found if name in left]
        return found


def partly_needed(store: PageStore) -> None:
    """One pack of six blocks, of which checkpoints need one."""
    save(store, "wide", WIDE)
    for _ in range(2):
        with store.commit() as commit:
            commit.publish("wide", WIDE.checkpoint(1))


def test_a_pack_that_is_compacted_while_others_list_and_open_it(store_dir: Path) -> None:
    """Its pages are in a new pack that the reader's listing doesn't have: it lists again."""
    for at in ("open_file", "names"):
        with PageStore.open(store_dir) as writer:
            partly_needed(writer)
            [before] = packs(store_dir)
            files = Meddling(at, lambda writer=writer: writer.gc(NOW))
            with PageStore.open(store_dir, mode="r", files=files) as reader:
                check_readable(reader, "wide", WIDE, 1)
            assert packs(store_dir) != [before]
            writer.purge("wide")
