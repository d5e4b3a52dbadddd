from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tqstore.paging.page_records import assemble, page_words, stream_views
from tqstore.spec import DTYPE_NBYTES, PAGE_HEADER_NBYTES, CodecSpec, PageSpec

SIDE_DATA = ("outlier_units", "outlier_channels", "mean_units", "mean_scales")
NUMPY = {"bfloat16": "uint16"}


def spec_of(keys: str, values: str, **changes: int | str) -> PageSpec:
    fields = {"kv_heads": 2, "key_dim": 64, "value_dim": 64, "page_tokens": 16, "dtype": "float16"}
    fields |= changes
    return PageSpec(keys=CodecSpec.parse(keys), values=CodecSpec.parse(values), **fields)


SPECS = [
    spec_of("prod4", "int8"),
    spec_of("mse4+mean+out7", "uni4+out3"),
    spec_of("mse3", "uni5"),
    spec_of("exact", "exact"),
    spec_of("exact", "exact", dtype="bfloat16"),
    spec_of("exact", "int8", dtype="float32"),
    spec_of("prod1", "mse7", key_dim=100, value_dim=80),
    spec_of("exact", "exact", kv_heads=1, key_dim=3, value_dim=5, page_tokens=1),
    spec_of("prod3", "uni1", kv_heads=3, key_dim=7, value_dim=1, page_tokens=5),
]


def random_streams(spec: PageSpec, role: str, num_pages: int) -> dict[str, np.ndarray]:
    """Random bytes for every stream of a side, as little-endian numpy arrays."""
    rng = np.random.default_rng(7)
    streams = {}
    for stream in spec.streams:
        if stream.name.startswith(role):
            raw = rng.integers(0, 256, num_pages * stream.nbytes, dtype=np.uint8)
            dtype = NUMPY.get(stream.dtype, stream.dtype)
            streams[stream.name] = raw.view(dtype).reshape(num_pages, *stream.shape)
    return streams


def to_mlx(streams: dict[str, np.ndarray], spec: PageSpec) -> dict[str, mx.array]:
    dtypes = {stream.name: stream.dtype for stream in spec.streams}
    arrays = {}
    for name, array in streams.items():
        converted = mx.array(array)
        if dtypes[name] == "bfloat16":
            converted = converted.view(mx.bfloat16)
        arrays[name.split("_", 1)[1]] = converted
    return arrays


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_records_hold_each_stream_at_its_offset_and_zeros_between(spec: PageSpec) -> None:
    keys, values = random_streams(spec, "key", 3), random_streams(spec, "value", 3)
    records = np.array(assemble(spec, to_mlx(keys, spec), to_mlx(values, spec)))
    assert records.shape == (3, page_words(spec))
    raw = records.view(np.uint8)
    used = np.zeros(spec.page_nbytes, np.bool_)
    for stream in spec.streams:
        part = slice(stream.offset, stream.offset + stream.nbytes)
        expected = (keys | values)[stream.name].reshape(3, -1).view(np.uint8)
        assert np.array_equal(raw[:, part], expected.reshape(3, -1))
        used[part] = True
    assert not raw[:, ~used].any()
    assert not used[:PAGE_HEADER_NBYTES].any()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_views_of_rows_of_a_larger_array_give_the_streams_back(spec: PageSpec) -> None:
    keys, values = random_streams(spec, "key", 4), random_streams(spec, "value", 4)
    segment = assemble(spec, to_mlx(keys, spec), to_mlx(values, spec))
    for role, streams in (("key", keys), ("value", values)):
        views = stream_views(spec, role, segment[1:3])
        assert sorted(views) == sorted(name.split("_", 1)[1] for name in streams)
        for name, expected in streams.items():
            view = views[name.split("_", 1)[1]]
            got = view if view.dtype != mx.bfloat16 else view.view(mx.uint16)
            got_bytes = np.array(mx.contiguous(got)).reshape(2, -1).view(np.uint8)
            assert np.array_equal(got_bytes, expected[1:3].reshape(2, -1).view(np.uint8))


def test_streams_never_overlap_and_start_aligned() -> None:
    for spec in SPECS:
        end = PAGE_HEADER_NBYTES
        for stream in spec.streams:
            is_packed_behind = stream.name.split("_", 1)[1] in SIDE_DATA
            assert stream.offset % (4 if is_packed_behind else 64) == 0
            assert stream.offset >= end
            end = stream.offset + stream.nbytes
            assert stream.nbytes == np.prod(stream.shape) * DTYPE_NBYTES[stream.dtype]
        assert spec.page_nbytes % 64 == 0
        assert 0 <= spec.page_nbytes - end < 64
