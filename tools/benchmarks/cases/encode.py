"""Packing vectors: prod4 keys and int8 values into page records, as sealing does it."""

from __future__ import annotations

import mlx.core as mx

import tqstore
from tools.benchmarks import veloxquant
from tools.benchmarks.row import Bar, Row
from tools.benchmarks.synthetic import Sizes
from tools.benchmarks.timing import timed
from tools.benchmarks.workshop import Workshop
from tqstore.paging.page_records import assemble
from tqstore.quant.registry import key_codec, value_codec
from tqstore.spec import CacheSpec

NAME = "encode"


def run(workshop: Workshop) -> list[Row]:
    sizes = workshop.sizes
    keys, values = _vectors(sizes)
    trials = {
        "ours": timed(lambda: pack(sizes, keys, values)),
        "mx.quantize": timed(lambda: _quantize(keys, values)),
    }
    taken = workshop.measure(NAME, trials)
    single, why_not = _velox_seconds(workshop)
    per_vector = taken["ours"] / sizes.vectors
    note = f"{sizes.vectors:,} float32 keys and values, d={sizes.head_dim}, one call"
    return [
        Row(
            NAME,
            per_vector * 1e6,
            "us/vector",
            f"VeloxQuant-MLX {veloxquant.VERSION}",
            None if single is None else single * 1e6,
            Bar(1 / 100),
            why_not
            or f"{note}; the peer takes one vector a call ({sizes.single_vectors:,} of them)",
        ),
        Row(
            f"{NAME}/mx-quantize",
            taken["ours"] * 1e3,
            "ms",
            "mx.quantize of both to 4 bits",
            taken["mx.quantize"] * 1e3,
            Bar(6.0),
            note,
        ),
    ]


def _vectors(sizes: Sizes) -> tuple[mx.array, mx.array]:
    """Keys and values [pages, heads, tokens, head_dim], as the layers hand them to the codecs."""
    page_tokens = CacheSpec.page_tokens
    pages = sizes.vectors // (sizes.heads * page_tokens)
    shape = (pages, sizes.heads, page_tokens, sizes.head_dim)
    keys, values = (mx.random.normal(shape, key=mx.random.key(seed)) for seed in (1, 2))
    mx.eval(keys, values)
    return keys, values


def pack(sizes: Sizes, keys: mx.array, values: mx.array) -> mx.array:
    """Page records, evaluated."""
    layer = tqstore.LayerSpec(
        kv_heads=sizes.heads, head_dim=sizes.head_dim, keys="prod4", values="int8", dtype="float32"
    )
    spec = tqstore.CacheSpec((layer,)).page_specs[0]
    records = assemble(
        spec, key_codec(spec, seed=0).encode(keys), value_codec(spec, seed=0).encode(values)
    )
    mx.eval(records)
    return records


def _quantize(keys: mx.array, values: mx.array) -> None:
    mx.eval(mx.quantize(keys, bits=4), mx.quantize(values, bits=4))


def _velox_seconds(workshop: Workshop) -> tuple[float | None, str]:
    """Seconds a vector, or None and why."""
    sizes = workshop.sizes
    try:
        peer = veloxquant.prepared(workshop.tools_folder, workshop.progress)
    except veloxquant.VeloxUnavailable as error:
        return None, str(error)
    trials = {"theirs": lambda: peer.seconds_a_vector(sizes.single_vectors, sizes.head_dim)}
    return workshop.measure(f"{NAME}: VeloxQuant", trials, rounds=3)["theirs"], ""
