"""Page records as MLX arrays: streams put together into records, and views of streams in records.

A record is `uint32 [page_words]`, byte for byte what a pack holds, except that its 64-byte header
is zero until the page is written out.  Views share the records' memory: no stream is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from tqstore.spec import DTYPE_NBYTES, PAGE_HEADER_NBYTES, PageSpec, StreamSpec

WORD_NBYTES = 4
MLX_DTYPES = {
    "uint8": mx.uint8,
    "int8": mx.int8,
    "uint16": mx.uint16,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
}
PACKED_STREAMS = ("codes", "signs")


def page_words(spec: PageSpec) -> int:
    return spec.page_nbytes // WORD_NBYTES


def assemble(
    spec: PageSpec, keys: Mapping[str, mx.array], values: Mapping[str, mx.array]
) -> mx.array:
    """Streams of n pages, each `[n, *stream shape]` -> records, uint32 [n, page_words], lazily."""
    num_pages = next(iter(keys.values())).shape[0]
    parts = [mx.zeros((num_pages, PAGE_HEADER_NBYTES // WORD_NBYTES), dtype=mx.uint32)]
    position = PAGE_HEADER_NBYTES
    for stream in spec.streams:
        side = keys if stream.name.startswith("key_") else values
        words = _as_words(side[_bare(stream.name)], stream)
        padding = (stream.offset - position) // WORD_NBYTES
        if padding:
            parts.append(mx.zeros((num_pages, padding), dtype=mx.uint32))
        parts.append(words)
        position = stream.offset + words.shape[1] * WORD_NBYTES
    if spec.page_nbytes > position:
        rest = (spec.page_nbytes - position) // WORD_NBYTES
        parts.append(mx.zeros((num_pages, rest), dtype=mx.uint32))
    return mx.concatenate(parts, axis=1)  # [n, page_words]


def stream_views(spec: PageSpec, role: str, records: mx.array) -> dict[str, mx.array]:
    """The streams of one side (`key` or `value`) of n records, `[n, *stream shape]`, not copied.

    Packed code streams come as uint32 words `[n, heads, tokens, row_words]` where a row is a whole
    number of words, which is how `mx.quantized_matmul` wants them, else as bytes.
    """
    return {
        _bare(stream.name): _view(stream, records)
        for stream in spec.streams
        if stream.name.startswith(role + "_")
    }


def _bare(name: str) -> str:
    return name.split("_", 1)[1]


def _as_words(array: mx.array, stream: StreamSpec) -> mx.array:
    """[n, *shape] -> uint32 [n, words], zero-padded to a whole number of words."""
    if array.dtype == mx.uint32 and stream.dtype == "uint8":
        return array.reshape(array.shape[0], -1)
    flat = array.astype(MLX_DTYPES[stream.dtype]).reshape(array.shape[0], -1)
    per_word = WORD_NBYTES // DTYPE_NBYTES[stream.dtype]
    excess = flat.shape[1] % per_word
    if excess:
        flat = mx.pad(flat, [(0, 0), (0, per_word - excess)])
    return mx.contiguous(flat).view(mx.uint32)


def _view(stream: StreamSpec, records: mx.array) -> mx.array:
    num_pages = records.shape[0]
    first = stream.offset // WORD_NBYTES
    words = records[:, first : first + -(-stream.nbytes // WORD_NBYTES)]
    *outer, inner = stream.shape
    if _bare(stream.name) in PACKED_STREAMS and inner % WORD_NBYTES == 0:
        return words.reshape(num_pages, *outer, inner // WORD_NBYTES)
    typed = words if stream.dtype == "uint32" else words.view(MLX_DTYPES[stream.dtype])
    count = stream.nbytes // DTYPE_NBYTES[stream.dtype]
    return typed[:, :count].reshape(num_pages, *stream.shape)
