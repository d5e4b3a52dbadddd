"""A session's pages in other codecs: decoded, encoded and published under its own or a new name.

Owns the re-coding of one checkpoint, page by page.  Blocks keep their tokens and get the names of
the other codecs' namespace; tails, states and metadata are carried over as they are.  A side whose
codec stays is copied bit for bit.  Does not own how pages are coded (quant's) or written (store's).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tqstore.errors import AlreadyExists, InvalidInput, NotFound
from tqstore.format.block_hash import BlockRecord, chain_blocks
from tqstore.format.checkpoint import Checkpoint, summarize
from tqstore.format.namespace import Namespace
from tqstore.format.page import PageKey, stamp_headers
from tqstore.paging.cold_reader import ColdReader
from tqstore.paging.page_records import assemble, stream_views
from tqstore.paging.staging import Staging
from tqstore.presets import codec_for
from tqstore.quant.codec import Codec, Streams
from tqstore.quant.registry import key_codec, value_codec
from tqstore.spec import PageSpec
from tqstore.store.page_store import Commit, NamespaceStore, PageStore

# float32 bytes of keys and values decoded at a time: bounds the transient memory.
TRANSIENT_NBYTES = 16 << 20

OnPages = Callable[[int, int], object]  # (pages done, pages in all)


@dataclass(frozen=True)
class SideReport:
    """Keys or values of all layers.

    `codecs` are pairs (before, after) of each layer.  `relative_errors` of each layer: the root of
    the summed squared differences to what was decoded before, over the root of its summed squares;
    None where the side was copied or no page was there.
    """

    codecs: tuple[tuple[str, str], ...]
    relative_errors: tuple[float | None, ...]

    @property
    def is_copied(self) -> bool:
        """Whether no layer's codec changed."""
        return all(before == after for before, after in self.codecs)

    @property
    def was_lossy(self) -> bool:
        """Whether what was re-coded had lost something before: the new error comes on top."""
        return any(before not in ("exact", after) for before, after in self.codecs)

    @property
    def worst_error(self) -> float | None:
        """The largest of `relative_errors`."""
        return max((error for error in self.relative_errors if error is not None), default=None)


@dataclass(frozen=True)
class TranscodeReport:
    """What a transcoding did.  Bytes are of pages; those written are new ones on disk."""

    session: str
    sequence: int
    num_tokens: int
    num_pages: int
    nbytes_before: int
    nbytes_after: int
    nbytes_written: int
    keys: SideReport
    values: SideReport


def transcode(
    store: PageStore,
    name: str,
    *,
    keys: str | None = None,
    values: str | None = None,
    to: str | None = None,
    on_pages: OnPages | None = None,
) -> TranscodeReport:
    """The newest checkpoint of session `name` once more, with all layers' `keys` and `values` coded
    so (codecs or presets; None keeps each layer's own).

    Published as the newest of `name`, or as the new session `to`.  Every page that is stored is
    re-coded: of a windowed layer those that were kept.  The exact tail stays exact.  On any error
    both sessions are as before.  Raises NotFound if there is no such session or pages of it are
    missing, AlreadyExists if `to` is there, InvalidInput for unknown codecs or if nothing would
    change, Conflict if the session was saved by another process meanwhile, StoreFull.
    """
    doing = f"converting session {name!r}"
    with store.commit() as commit:
        newest = commit.newest(name)
        checkpoint = store.latest(name)
        if to is not None and commit.newest(to):
            raise AlreadyExists(
                f"there is a session {to!r}", doing=doing, remedy="Remove it or use another name"
            )
        source = store.namespace(store.stored_namespace(checkpoint.namespace_id))
        target = store.namespace(recoded(source.namespace, keys, values))
        if target.id == source.id:
            raise InvalidInput(
                "it is in these codecs already",
                doing=doing,
                remedy="For a copy, resume it and save that under another name: pages are shared",
            )
        _require_whole(source, checkpoint, name, doing)
        blocks = _renamed_blocks(source, target, checkpoint, doing)
        work = _Transcoding(source, target, checkpoint.block_hashes, blocks)
        work.run(commit, on_pages)
        recoded_checkpoint = replace(
            checkpoint,
            namespace_id=target.id,
            block_hashes=tuple(block.hash for block in blocks),
            created_ns=time.time_ns(),
            paging={},  # no pool ever held these pages
        )
        sequence = commit.publish(
            name if to is None else to, recoded_checkpoint, after=newest if to is None else 0
        )
    return TranscodeReport(
        session=name if to is None else to,
        sequence=sequence,
        num_tokens=checkpoint.num_tokens,
        num_pages=work.num_pages,
        nbytes_before=work.nbytes_of(source),
        nbytes_after=work.nbytes_of(target),
        nbytes_written=commit.nbytes_written,
        keys=work.report("key"),
        values=work.report("value"),
    )


def recoded(namespace: Namespace, keys: str | None, values: str | None) -> Namespace:
    """The namespace of the same model and settings with other codecs."""
    sides = {"keys": keys, "values": values}
    given = {side: codec_for(side, text) for side, text in sides.items() if text is not None}
    if not given:
        raise InvalidInput("no codec is given for keys or values", doing="converting a session")
    layers = tuple(replace(layer, **given) for layer in namespace.layers)  # type: ignore[arg-type]
    return replace(namespace, layers=layers)


def _require_whole(source: NamespaceStore, checkpoint: Checkpoint, name: str, doing: str) -> None:
    source.refresh()  # its index, when the store has just been opened, is empty
    missing = source.missing_page(summarize(checkpoint, name, 1))
    if missing is not None:
        layer, block = missing
        raise NotFound(
            f"the page of layer {layer}, block {block.hex()} is missing",
            doing=doing,
            remedy="`tqstore verify` tells what is damaged; resume takes what is left",
        )


def _renamed_blocks(
    source: NamespaceStore, target: NamespaceStore, checkpoint: Checkpoint, doing: str
) -> list[BlockRecord]:
    """The checkpoint's blocks under their names in `target`, which follow from all tokens."""
    try:
        tokens = source.tokens_of(checkpoint.block_hashes)
    except NotFound as error:
        raise NotFound(
            f"the tokens of its first blocks are gone with their pages ({error})",
            doing=doing,
            remedy="Feed the conversation to a new session with these codecs",
        ) from error
    return chain_blocks(target.id, tokens, checkpoint.page_tokens)


class _Side:
    """Keys or values of one layer on their way from one codec to another."""

    def __init__(self, role: str, before: PageSpec, after: PageSpec, seed: int) -> None:
        codec = key_codec if role == "key" else value_codec
        self.role = role
        self.codecs = tuple(
            str(spec.keys if role == "key" else spec.values) for spec in (before, after)
        )
        self.is_copied = self.codecs[0] == self.codecs[1]
        self._before = before
        self._source: Codec = codec(before, seed)
        self._target: Codec = codec(after, seed)
        self._squares = 0.0  # of what was decoded
        self._differences = 0.0  # squared, to what is decoded now

    @property
    def relative_error(self) -> float | None:
        if self.is_copied or not self._squares:
            return None
        return math.sqrt(self._differences / self._squares)

    def recode(self, records: mx.array) -> Streams:
        """Streams of records, uint32 [n, page_words], in the new codec."""
        views = stream_views(self._before, self.role, records)
        if self.is_copied:
            return views
        vectors = self._source.decode(views)  # within what the model's dtype holds
        streams = self._target.encode(vectors)  # vectors [n, heads, tokens, dim]
        self._measure(vectors.astype(mx.float32), self._target.decode(streams).astype(mx.float32))
        return streams

    def _measure(self, before: mx.array, after: mx.array) -> None:
        unit = float(mx.abs(before).max())
        if not unit:
            unit = 1.0
        squares = float(mx.square(before / unit).sum())
        differences = float(mx.square((after - before) / unit).sum())
        if not math.isfinite(squares) or not math.isfinite(differences):
            raise InvalidInput(
                f"{self.role}s do not fit codec {self.codecs[1]}: it decodes them to numbers that "
                "are not finite",
                doing="converting a session",
            )
        self._squares += squares * unit * unit
        self._differences += differences * unit * unit


class _Transcoding:
    """The pages of one checkpoint, re-coded and written pack by pack."""

    def __init__(
        self,
        source: NamespaceStore,
        target: NamespaceStore,
        old_names: Sequence[bytes],
        blocks: Sequence[BlockRecord],
    ) -> None:
        self._source = source
        self._target = target
        self._old_names = old_names
        self._blocks = blocks
        self._reader = ColdReader(source)
        self._staging = Staging()
        self._specs = list(zip(source.namespace.layers, target.namespace.layers, strict=True))
        seed = source.namespace.seed
        self._sides = {
            role: [_Side(role, before, after, seed) for before, after in self._specs]
            for role in ("key", "value")
        }
        self._stored = [self._stored_blocks(layer) for layer in range(len(self._specs))]
        self._done = 0

    @property
    def num_pages(self) -> int:
        return sum(map(len, self._stored))

    def nbytes_of(self, pages: NamespaceStore) -> int:
        """Bytes of the pages in the codecs of that namespace."""
        layers = zip(pages.namespace.layers, self._stored, strict=True)
        return sum(spec.page_nbytes * len(stored) for spec, stored in layers)

    def report(self, role: str) -> SideReport:
        sides = self._sides[role]
        return SideReport(
            codecs=tuple((side.codecs[0], side.codecs[1]) for side in sides),
            relative_errors=tuple(side.relative_error for side in sides),
        )

    def run(self, commit: Commit, on_pages: OnPages | None) -> None:
        """Writes every page; a pack holds all layers of a range of blocks, as saving does it."""
        groups: dict[bytes, list[int]] = {}
        for layer, (_, after) in enumerate(self._specs):
            groups.setdefault(after.digest, []).append(layer)
        for layers in groups.values():
            spec = self._specs[layers[0]][1]
            step = max(1, self._target.pack_pages(spec) // len(layers))
            for first in range(0, len(self._blocks), step):
                self._write(commit, spec, layers, range(first, first + step))
                if on_pages is not None:
                    on_pages(self._done, self.num_pages)

    def _write(self, commit: Commit, spec: PageSpec, layers: list[int], span: range) -> None:
        chosen = [(layer, _within(self._stored[layer], span)) for layer in layers]
        keys: list[PageKey] = [
            (layer, self._blocks[block].hash) for layer, blocks in chosen for block in blocks
        ]
        if not keys:
            return
        records = self._staging.rows(len(keys), spec.page_nbytes)
        first = 0
        for layer, blocks in chosen:
            for rows in self._recoded(layer, blocks):
                records[first : first + len(rows)] = rows
                first += len(rows)
        stamp_headers(records, spec, keys)
        named = self._blocks[span.start : span.stop]
        commit.add_pages(self._target, spec, named, keys, records)
        self._done += len(keys)

    def _recoded(self, layer: int, blocks: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """Records of a layer's blocks in the new codecs, uint8 [n, page_nbytes], run by run."""
        before, after = self._specs[layer]
        per_page = 4 * before.kv_heads * before.page_tokens * (before.key_dim + before.value_dim)
        step = max(1, TRANSIENT_NBYTES // per_page)
        for first in range(0, len(blocks), step):
            names = [self._old_names[block] for block in blocks[first : first + step]]
            records = self._reader.read(before, layer, names)
            keys = self._sides["key"][layer].recode(records)
            values = self._sides["value"][layer].recode(records)
            yield np.array(assemble(after, keys, values)).view(np.uint8)

    def _stored_blocks(self, layer: int) -> list[int]:
        """Blocks whose page of the layer is in the store: of a windowed layer maybe not all."""
        index = self._source.index(self._specs[layer][0])
        return [
            block
            for block, name in enumerate(self._old_names)
            if index.layers_of(name) >> layer & 1
        ]


def _within(blocks: list[int], span: range) -> list[int]:
    """Those of sorted `blocks` that are in `span`."""
    return blocks[bisect_left(blocks, span.start) : bisect_left(blocks, span.stop)]
