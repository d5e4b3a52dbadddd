"""Hypothesis strategies for the records of the format."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tqstore.format.arrays import ARRAY_DTYPES, RawArray
from tqstore.format.checkpoint import Checkpoint, LayerTail, ModelState
from tqstore.format.namespace import Namespace
from tqstore.spec import CodecSpec, PageSpec

CODECS = ["prod4", "prod4+gauss", "prod2", "mse3", "uni4", "int8", "exact", "mse4+mean"]
hashes = st.binary(min_size=16, max_size=16)


def plain_values(max_leaves: int = 8) -> st.SearchStrategy[object]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=10)
        | st.binary(max_size=10)
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=max_leaves,
    )


@st.composite
def page_specs(draw: st.DrawFn, page_tokens: int | None = None) -> PageSpec:
    return PageSpec(
        kv_heads=draw(st.integers(1, 4)),
        key_dim=draw(st.sampled_from([1, 8, 64, 80, 96, 128])),
        value_dim=draw(st.sampled_from([1, 8, 64, 80, 128])),
        page_tokens=page_tokens or draw(st.sampled_from([1, 8, 16, 64])),
        keys=CodecSpec.parse(draw(st.sampled_from(CODECS))),
        values=CodecSpec.parse(draw(st.sampled_from(CODECS))),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        rotation=draw(st.sampled_from(["auto", "haar"])),
    )


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    page_tokens = draw(st.sampled_from([8, 64]))
    return Namespace.of(
        draw(st.text("0123456789abcdef", min_size=16, max_size=64)),
        draw(st.lists(page_specs(page_tokens), min_size=1, max_size=5)),
        seed=draw(st.integers(0, (1 << 63) - 1)),
        parts=draw(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)),
        tenant_salt=draw(st.none() | st.binary(min_size=1, max_size=8)),
    )


@st.composite
def raw_arrays(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> RawArray:
    dtype = draw(st.sampled_from(sorted(ARRAY_DTYPES)))
    sizes = shape if shape is not None else tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    nbytes = int(np.prod(sizes)) * ARRAY_DTYPES[dtype]
    return RawArray(dtype, sizes, draw(st.binary(min_size=nbytes, max_size=nbytes)))


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    page_tokens = draw(st.integers(1, 8))
    num_blocks, num_tail = draw(st.integers(0, 5)), draw(st.integers(0, 10))
    num_tokens = num_blocks * page_tokens + num_tail
    return Checkpoint(
        namespace_id=draw(st.binary(min_size=32, max_size=32)),
        page_tokens=page_tokens,
        num_tokens=num_tokens,
        block_hashes=tuple(draw(hashes) for _ in range(num_blocks)),
        tail_tokens=draw(st.binary(min_size=8 * num_tail, max_size=8 * num_tail)),
        layers=tuple(
            draw(_layer_tails(num_blocks * page_tokens, num_tokens))
            for _ in range(draw(st.integers(0, 3)))
        ),
        states=tuple(draw(st.lists(_model_states(), max_size=2))),
        metadata=draw(st.dictionaries(st.text(max_size=5), plain_values(), max_size=3)),
        created_ns=draw(st.integers(0, (1 << 63) - 1)),
        recent_tokens=draw(st.integers(0, 100)),
        window_history=draw(st.booleans()),
        expires_ns=draw(st.integers(0, (1 << 63) - 1)),
        paging=draw(
            st.dictionaries(st.text(max_size=5), st.integers(0, (1 << 63) - 1), max_size=3)
        ),
    )


@st.composite
def _layer_tails(draw: st.DrawFn, sealed: int, num_tokens: int) -> LayerTail:
    start = draw(st.integers(0, sealed))
    shape = (draw(st.integers(1, 2)), num_tokens - start, draw(st.integers(1, 2)))
    nbytes = int(np.prod(shape)) * 2
    keys, values = (
        RawArray("bfloat16", shape, draw(st.binary(min_size=nbytes, max_size=nbytes)))
        for _ in range(2)
    )
    window = draw(st.none() | st.integers(1, 100))
    return LayerTail(start, keys, values, window, draw(st.integers(0, 10)))


@st.composite
def _model_states(draw: st.DrawFn) -> ModelState:
    return ModelState(
        layer=draw(st.integers(0, 1000)),
        class_name=draw(st.text(max_size=8)),
        arrays=tuple(draw(st.lists(raw_arrays(), max_size=2))),
        meta=draw(plain_values()),
    )
