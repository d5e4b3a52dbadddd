"""The checkpoint record: a session's state at one moment, without the pages it names.

Owns its fields, what they must satisfy, and its two frames: a summary (what it is, which pages it
needs) that listing and gc read alone, then the state (tail and other arrays).  Size: the tail plus
16 bytes a block plus the states.  Where it is kept and which one is newest is the store's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tqstore.errors import Corrupt, InvalidInput
from tqstore.format.arrays import RawArray
from tqstore.format.block_hash import HASH_NBYTES, needed_blocks
from tqstore.format.format_file import FORMAT_VERSION
from tqstore.format.framing import Buffer, frame_nbytes, read_frame, write_frame
from tqstore.format.namespace import MAX_LAYERS
from tqstore.format.plain import Fields, is_counts, pack_plain, unpack_map

MAGIC = b"TQCK"
STATE_MAGIC = b"TQCS"
MAX_SUMMARY_NBYTES = 1 << 28
MAX_STATE_NBYTES = (1 << 32) - 1
_MAX_TOKENS = 1 << 40
_MAX_PAGE_TOKENS = 1 << 14


@dataclass(frozen=True)
class LayerTail:
    """One paged layer: what it sees, and its unsealed tokens exactly.

    `start` is the position of the tail's first token; `keys` [kv_heads, n, key_dim] and `values`
    [kv_heads, n, value_dim] hold tokens start .. num_tokens - 1 in the model's dtype.
    """

    start: int
    keys: RawArray
    values: RawArray
    window: int | None = None
    sink_tokens: int = 0


@dataclass(frozen=True)
class ModelState:
    """State of a layer that is not paged, exactly: `layer` is its index in the model's list."""

    layer: int
    class_name: str
    arrays: tuple[RawArray, ...]
    meta: Any = None


@dataclass(frozen=True)
class Checkpoint:
    """Immutable.  num_tokens == len(block_hashes) * page_tokens + len(tail_tokens).

    `tail_tokens` are raw little-endian int64.  `recent_tokens` is how many tokens the cache keeps
    exact behind a block before it seals it.  `metadata` is any string-keyed map of plain values.
    With `window_history` it also keeps pages that left a layer's window.
    `paging` are counters of the pool that held its pages when it was saved, as far as known.
    From `expires_ns` (nanoseconds since 1970; 0 is never) on gc may take the session away.
    Raises InvalidInput when it is made inconsistent.
    """

    namespace_id: bytes
    page_tokens: int
    num_tokens: int
    block_hashes: tuple[bytes, ...]
    tail_tokens: bytes
    layers: tuple[LayerTail, ...]
    states: tuple[ModelState, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    created_ns: int = 0
    recent_tokens: int = 0
    window_history: bool = True
    expires_ns: int = 0
    paging: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.namespace_id) != 32:
            raise InvalidInput(f"a namespace id has 32 bytes, not {len(self.namespace_id)}")
        if not 1 <= self.page_tokens <= _MAX_PAGE_TOKENS:
            raise InvalidInput(f"page_tokens must be 1 to {_MAX_PAGE_TOKENS}: {self.page_tokens}")
        if any(len(block_hash) != HASH_NBYTES for block_hash in self.block_hashes):
            raise InvalidInput(f"a block hash has {HASH_NBYTES} bytes")
        sealed = len(self.block_hashes) * self.page_tokens
        if len(self.tail_tokens) % 8 or sealed + len(self.tail_tokens) // 8 != self.num_tokens:
            raise InvalidInput(
                f"{len(self.block_hashes)} blocks of {self.page_tokens} and "
                f"{len(self.tail_tokens)} bytes of tail tokens are not {self.num_tokens} tokens"
            )
        if not 0 <= self.created_ns < 1 << 63:
            raise InvalidInput(f"created_ns is {self.created_ns}")
        if not 0 <= self.expires_ns < 1 << 63:
            raise InvalidInput(f"expires_ns is {self.expires_ns}")
        if not 0 <= self.recent_tokens < _MAX_TOKENS:
            raise InvalidInput(f"recent_tokens is {self.recent_tokens}")
        if not is_counts(self.paging):
            raise InvalidInput(f"paging is not a map of counts: {self.paging}")
        for i, layer in enumerate(self.layers):
            self._check_layer(layer, f"layers[{i}]")

    def _check_layer(self, layer: LayerTail, where: str) -> None:
        if not 0 <= layer.start <= len(self.block_hashes) * self.page_tokens:
            raise InvalidInput(f"{where}: the tail starts at {layer.start}, beyond the last page")
        if not (layer.window is None or 1 <= layer.window < _MAX_TOKENS):
            raise InvalidInput(f"{where}: window {layer.window}")
        if not 0 <= layer.sink_tokens < _MAX_TOKENS:
            raise InvalidInput(f"{where}: sink_tokens {layer.sink_tokens}")
        keys, values, num_tail = layer.keys, layer.values, self.num_tokens - layer.start
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[0] != values.shape[0]:
            raise InvalidInput(f"{where}: tail shapes {keys.shape} and {values.shape}")
        if keys.shape[1] != num_tail or values.shape[1] != num_tail or keys.dtype != values.dtype:
            raise InvalidInput(
                f"{where}: the tail must hold {num_tail} tokens of one dtype, not "
                f"{keys.dtype} {keys.shape} and {values.dtype} {values.shape}"
            )


@dataclass(frozen=True)
class CheckpointSummary:
    """The first frame: which session's, what it is, and which pages it needs.

    `reach` holds (window, sink_tokens, tail start) of each layer.
    """

    session: str
    sequence: int
    namespace_id: bytes
    page_tokens: int
    num_tokens: int
    created_ns: int
    expires_ns: int
    block_hashes: tuple[bytes, ...]
    reach: tuple[tuple[int | None, int, int], ...]
    metadata: dict[str, Any]
    paging: dict[str, int]

    def needed_blocks(self, layer: int) -> Iterator[bytes]:
        """Hashes of the blocks whose page of `layer` a resume needs, newest first."""
        window, sink_tokens, start = self.reach[layer]
        num_blocks = -(-start // self.page_tokens)
        sinks, first = needed_blocks(num_blocks, self.page_tokens, window, sink_tokens)
        yield from reversed(self.block_hashes[first:num_blocks])
        yield from reversed(self.block_hashes[:sinks])


def summarize(checkpoint: Checkpoint, session: str, sequence: int) -> CheckpointSummary:
    return CheckpointSummary(
        session=session,
        sequence=sequence,
        namespace_id=checkpoint.namespace_id,
        page_tokens=checkpoint.page_tokens,
        num_tokens=checkpoint.num_tokens,
        created_ns=checkpoint.created_ns,
        expires_ns=checkpoint.expires_ns,
        block_hashes=checkpoint.block_hashes,
        reach=tuple((layer.window, layer.sink_tokens, layer.start) for layer in checkpoint.layers),
        metadata=checkpoint.metadata,
        paging=checkpoint.paging,
    )


def encode_checkpoint(checkpoint: Checkpoint, session: str, sequence: int) -> bytes:
    """Both frames.  InvalidInput for metadata or state meta that is not plain."""
    summary: dict[str, Any] = {
        "session": session,
        "sequence": sequence,
        "namespace": checkpoint.namespace_id,
        "page_tokens": checkpoint.page_tokens,
        "num_tokens": checkpoint.num_tokens,
        "created_ns": checkpoint.created_ns,
        "expires_ns": checkpoint.expires_ns,
        "block_hashes": b"".join(checkpoint.block_hashes),
        "reach": [[tail.window, tail.sink_tokens, tail.start] for tail in checkpoint.layers],
        "metadata": checkpoint.metadata,
    }
    if checkpoint.paging:
        summary["paging"] = checkpoint.paging
    state: dict[str, Any] = {
        "recent_tokens": checkpoint.recent_tokens,
        "tail_tokens": checkpoint.tail_tokens,
        "tails": [
            {"keys": tail.keys.to_plain(), "values": tail.values.to_plain()}
            for tail in checkpoint.layers
        ],
        "states": [
            {
                "layer": state.layer,
                "class": state.class_name,
                "arrays": [array.to_plain() for array in state.arrays],
                "meta": state.meta,
            }
            for state in checkpoint.states
        ],
    }
    if not checkpoint.window_history:
        state["window_history"] = False
    bodies = (pack_plain(summary, "checkpoint"), pack_plain(state, "checkpoint state"))
    if len(bodies[0]) > MAX_SUMMARY_NBYTES or len(bodies[1]) > MAX_STATE_NBYTES:
        raise InvalidInput("the checkpoint's metadata or state is too large for one record")
    return write_frame(MAGIC, FORMAT_VERSION, bodies[0]) + write_frame(
        STATE_MAGIC, FORMAT_VERSION, bodies[1]
    )


def summary_nbytes(head: Buffer, file: str) -> int:
    """Bytes of the summary frame, from the file's first 24 bytes."""
    return frame_nbytes(head, MAGIC, FORMAT_VERSION, file=file, max_nbytes=MAX_SUMMARY_NBYTES)


def state_nbytes(head: Buffer, file: str) -> int:
    """Bytes of the state frame, from its first 24 bytes."""
    return frame_nbytes(head, STATE_MAGIC, FORMAT_VERSION, file=file, max_nbytes=MAX_STATE_NBYTES)


def decode_summary(data: Buffer, file: str) -> CheckpointSummary:
    """The summary that `data` starts with; Corrupt, or Incompatible if newer."""
    body = read_frame(
        data, MAGIC, FORMAT_VERSION, file=file, max_nbytes=MAX_SUMMARY_NBYTES, is_whole=False
    )
    fields = unpack_map(body, file)
    joined = fields.take("block_hashes", bytes)
    summary = CheckpointSummary(
        session=fields.take("session", str),
        sequence=fields.take_int("sequence", 1, (1 << 63) - 1),
        namespace_id=fields.take_bytes("namespace", 32),
        page_tokens=fields.take_int("page_tokens", 1, _MAX_PAGE_TOKENS),
        num_tokens=fields.take_int("num_tokens", 0, _MAX_TOKENS),
        created_ns=fields.take_int("created_ns", 0, (1 << 63) - 1),
        expires_ns=fields.take_int("expires_ns", 0, (1 << 63) - 1),
        block_hashes=tuple(
            joined[at : at + HASH_NBYTES] for at in range(0, len(joined), HASH_NBYTES)
        ),
        reach=tuple(_reach(item, file) for item in fields.take("reach", list)),
        metadata=fields.take("metadata", dict),
        paging=fields.take_counts("paging"),
    )
    fields.done()
    if len(summary.reach) > MAX_LAYERS:
        raise Corrupt(file, f"the summary has {len(summary.reach)} layers, more than {MAX_LAYERS}")
    sealed = len(joined) // HASH_NBYTES * summary.page_tokens
    if len(joined) % HASH_NBYTES or any(start > sealed for _, _, start in summary.reach):
        raise Corrupt(file, "the summary's blocks and tails do not fit together")
    return summary


def _reach(item: object, file: str) -> tuple[int | None, int, int]:
    if isinstance(item, list) and len(item) == 3:
        window, sink_tokens, start = item
        if (window is None or _is_count(window, 1)) and _is_count(sink_tokens) and _is_count(start):
            return window, sink_tokens, start
    raise Corrupt(file, "a layer's reach is not (window, sink tokens, tail start)")


def _is_count(value: object, low: int = 0) -> bool:
    return type(value) is int and low <= value < _MAX_TOKENS


def decode_checkpoint(data: Buffer, file: str) -> tuple[CheckpointSummary, Checkpoint]:
    """A whole checkpoint file; Corrupt for any damage, Incompatible if newer."""
    summary = decode_summary(data, file)
    rest = memoryview(data)[summary_nbytes(data, file) :]
    body = read_frame(rest, STATE_MAGIC, FORMAT_VERSION, file=file, max_nbytes=MAX_STATE_NBYTES)
    fields = unpack_map(body, file)
    tails = fields.take_maps("tails")
    if len(tails) != len(summary.reach):
        raise Corrupt(file, f"{len(tails)} tails for {len(summary.reach)} layers")
    layers = tuple(_layer(tail, reach) for tail, reach in zip(tails, summary.reach, strict=True))
    states = tuple(_state(item) for item in fields.take_maps("states"))
    tail_tokens = fields.take("tail_tokens", bytes)
    recent_tokens = fields.take_int("recent_tokens", 0, _MAX_TOKENS - 1)
    window_history = fields.take_flag("window_history", absent=True)
    fields.done()
    try:
        checkpoint = Checkpoint(
            namespace_id=summary.namespace_id,
            page_tokens=summary.page_tokens,
            num_tokens=summary.num_tokens,
            block_hashes=summary.block_hashes,
            tail_tokens=tail_tokens,
            layers=layers,
            states=states,
            metadata=summary.metadata,
            created_ns=summary.created_ns,
            expires_ns=summary.expires_ns,
            recent_tokens=recent_tokens,
            window_history=window_history,
            paging=summary.paging,
        )
    except InvalidInput as error:
        raise Corrupt(file, str(error)) from error
    return summary, checkpoint


def _layer(fields: Fields, reach: tuple[int | None, int, int]) -> LayerTail:
    window, sink_tokens, start = reach
    keys, values = (
        RawArray.from_fields(Fields(fields.take(side, dict), fields.file, f"{fields.where}.{side}"))
        for side in ("keys", "values")
    )
    fields.done()
    return LayerTail(start, keys, values, window, sink_tokens)


def _state(fields: Fields) -> ModelState:
    layer = fields.take_int("layer", 0, (1 << 31) - 1)
    class_name = fields.take("class", str)
    arrays = tuple(RawArray.from_fields(item) for item in fields.take_maps("arrays"))
    meta = fields.take_any("meta")
    fields.done()
    return ModelState(layer, class_name, arrays, meta)
