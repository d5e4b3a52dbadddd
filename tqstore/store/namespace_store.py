"""One namespace of a store: finding, matching and reading its pages.

Owns an index and a reader for each page spec, made when first used.  Writing is `commit`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tqstore.errors import Corrupt, InvalidInput, NotFound
from tqstore.format.block_hash import BlockRecord, needed_blocks
from tqstore.format.checkpoint import CheckpointSummary
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackLayout
from tqstore.format.page import Records
from tqstore.spec import PageSpec
from tqstore.store.completeness import Completeness
from tqstore.store.folder import Folder
from tqstore.store.pack_index import PackIndex
from tqstore.store.page_reader import PageReader
from tqstore.store.records import Counters, Location
from tqstore.store.root import NAMESPACES, PAGES

if TYPE_CHECKING:
    from tqstore.store.page_store import PageStore

_MAX_READS = 4  # of a page that is moved or damaged each time


class NamespaceStore:
    """Handle of a namespace; nothing is on disk until its first page is committed.

    Thread-safe.  Other processes' pages are found without reopening.
    """

    def __init__(
        self, namespace: Namespace, root: Folder, counters: Counters, store: PageStore
    ) -> None:
        self.namespace = namespace
        self.store = store
        self._root = root
        self._counters = counters
        self._by_digest = {spec.digest: self._open(spec) for spec in namespace.page_specs}
        self.completeness = Completeness()
        self.generation = -1  # of deletions, when the indexes were last checked against the disk
        self.ready: set[bytes] = set()  # specs (b"": none) whose folders this process made durable

    def _open(self, spec: PageSpec) -> tuple[PackIndex, PageReader]:
        index = PackIndex(spec, lambda: self._spec_folder(spec))
        return index, PageReader(index, self._root.files)

    def _spec_folder(self, spec: PageSpec) -> Folder:
        return self._root.descend(NAMESPACES, self.folder_name, PAGES, spec.name)

    @property
    def id(self) -> bytes:
        return self.namespace.id

    @property
    def folder_name(self) -> str:
        return self.namespace.id.hex()

    def close(self) -> None:
        for index, reader in self._by_digest.values():
            reader.close()
            index.close()

    def index(self, spec: PageSpec) -> PackIndex:
        return self._of(spec)[0]

    @property
    def indexes(self) -> list[PackIndex]:
        return [index for index, _ in self._by_digest.values()]

    def refresh(self) -> bool:
        """Looks for packs that came or went; True if there were any.  A stat a page spec."""
        changes = [index.refresh() for index in self.indexes]
        return any(changes)

    def _of(self, spec: PageSpec) -> tuple[PackIndex, PageReader]:
        found = self._by_digest.get(spec.digest)
        if found is None:
            raise InvalidInput(f"{spec.name} is not a page spec of namespace {self.folder_name}")
        return found

    def pack_pages(self, spec: PageSpec) -> int:
        """Pages a full pack holds."""
        return PackLayout.of(spec).max_pages

    def locate(self, spec: PageSpec, layer: int, block_hash: bytes) -> Location | None:
        """Where the page is, or None.  A miss looks once whether newer packs have come."""
        index = self._of(spec)[0]
        found = index.find(layer, block_hash)
        if found is None and index.refresh():
            found = index.find(layer, block_hash)
        return found

    def block(self, block_hash: bytes) -> BlockRecord | None:
        """The block's parent and tokens, or None if no page of it is here."""
        for index in self.indexes:
            found = index.block(block_hash, self.id)
            if found is None and index.refresh():
                found = index.block(block_hash, self.id)
            if found is not None:
                return found
        return None

    def missing_page(self, summary: CheckpointSummary) -> tuple[int, bytes] | None:
        """(layer, block hash) of a page that a resume of `summary` needs and that isn't there.

        Makes the names of the packs it relies on durable as it goes.
        """
        return self.completeness.missing_page(self.namespace, summary, self.index)

    def tokens_of(self, block_hashes: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Tokens of a chain's blocks joined, int64; NotFound if one of them is not here."""
        blocks = [self.block(block_hash) for block_hash in block_hashes]
        for block_hash, block in zip(block_hashes, blocks, strict=True):
            if block is None:
                raise NotFound(f"block {block_hash.hex()} is not in the store")
        found = [block.tokens for block in blocks if block is not None]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def read_pages(
        self, spec: PageSpec, locations: Sequence[Location], out: memoryview | Records
    ) -> None:
        """Fills row i of `out`, uint8 [n, page_nbytes], with the page at `locations[i]`.

        Fast into page-aligned memory (an anonymous mmap), 5 to 9 times slower into numpy's own.
        A page that was moved or is damaged where it was is looked up again: gc copies pages out of
        packs, and another copy may be sound.  Raises NotFound if it is nowhere, Corrupt if it is
        damaged, which `locate` then no longer returns.  Rows are undefined after an error.
        """
        for attempt in range(_MAX_READS):
            try:
                self.read_exactly(spec, locations, out)
                break
            except (Corrupt, NotFound):
                moved = self._moved(spec, locations)
                if len(moved) < len(locations) or attempt == _MAX_READS - 1:
                    raise
                locations = moved
        if self.store.mode != "r":
            self.index(spec).touch({location.pack for location in locations})
        self._counters.pages_read += len(locations)
        self._counters.nbytes_read += len(locations) * spec.page_nbytes

    def _moved(self, spec: PageSpec, locations: Sequence[Location]) -> list[Location]:
        """Where the pages are now, as far as they are anywhere."""
        index = self.index(spec)
        index.refresh(is_forced=True)
        found = [index.find(at.layer, at.block_hash) for at in locations]
        return [location for location in found if location is not None]

    def read_exactly(
        self, spec: PageSpec, locations: Sequence[Location], out: memoryview | Records
    ) -> None:
        """As `read_pages`, from these places and no others."""
        self._of(spec)[1].read(locations, out)

    def note_use(self, block_hashes: Sequence[bytes]) -> None:
        """Marks the packs of these blocks as used now: gc takes the longest unused first."""
        if self.store.mode == "r":
            return
        for index in self.indexes:
            index.touch({number for name in block_hashes for number in index.packs_of(name)})

    def match(
        self,
        layer_specs: Sequence[PageSpec],
        windows: Sequence[int | None],
        sink_tokens: Sequence[int],
        block_hashes: Sequence[bytes],
    ) -> int:
        """The largest n such that a cache of the first n blocks can be resumed for every layer.

        `windows` and `sink_tokens` say what each layer sees: a windowed one needs only its last
        blocks and its sinks (`format.block_hash.needed_blocks`).
        """
        if not len(layer_specs) == len(windows) == len(sink_tokens):
            raise InvalidInput("layer_specs, windows and sink_tokens must have one item a layer")
        groups: dict[tuple[bytes, int | None, int], int] = {}
        for layer, (spec, window, sinks) in enumerate(
            zip(layer_specs, windows, sink_tokens, strict=True)
        ):
            self._of(spec)
            key = (spec.digest, window, sinks if window is not None else 0)
            groups[key] = groups.get(key, 0) | 1 << layer
        matched = self._match(groups, block_hashes)
        if matched < len(block_hashes) and self.refresh():
            matched = self._match(groups, block_hashes)
        return matched

    def _match(
        self, groups: dict[tuple[bytes, int | None, int], int], block_hashes: Sequence[bytes]
    ) -> int:
        """`groups` maps (spec digest, window, sinks) to the mask of the layers that share them."""
        page_tokens = self.namespace.page_tokens
        present: list[list[bool]] = []
        for (digest, _, _), wanted in groups.items():
            index = self._by_digest[digest][0]
            present.append([index.layers_of(h) & wanted == wanted for h in block_hashes])
        possible = [True] * (len(block_hashes) + 1)
        for (_, window, sinks), has_page in zip(groups, present, strict=True):
            _rule_out(possible, has_page, page_tokens, window, sinks)
        return max(n for n, is_possible in enumerate(possible) if is_possible)


def _rule_out(
    possible: list[bool],
    has_page: Sequence[bool],
    page_tokens: int,
    window: int | None,
    sink_tokens: int,
) -> None:
    """Clears possible[n] where a cache of n blocks would need a page that isn't there.

    `ends[n]` counts the pages missing in blocks [0, n).
    """
    ends = [0]
    for is_there in has_page:
        ends.append(ends[-1] + (not is_there))
    for n in range(len(possible)):
        sinks, first = needed_blocks(n, page_tokens, window, sink_tokens)
        if ends[sinks] or ends[n] != ends[first]:
            possible[n] = False
