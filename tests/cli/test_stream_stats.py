"""Codes unpacked and counted, numbers measured: against plain Python and numpy on their own."""

from __future__ import annotations

from collections import Counter
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqstore.cli.bars import histogram_table, long_bar, small_bars
from tqstore.cli.stream_stats import NUM_BINS, page_stats, rebinned, unpack_codes
from tqstore.spec import CodecSpec, PageSpec


def packed(codes: list[int], bits: int) -> bytes:
    """LSB-first by arithmetic on one big integer."""
    whole = sum(code << (i * bits) for i, code in enumerate(codes))
    return whole.to_bytes(-(-len(codes) * bits // 8), "little")


def spec_of(keys: str, values: str = "exact", dtype: str = "float32", dim: int = 80) -> PageSpec:
    return PageSpec(2, dim, dim, 4, CodecSpec.parse(keys), CodecSpec.parse(values), dtype)


def record_of(spec: PageSpec, **streams: bytes) -> np.ndarray:
    record = np.zeros(spec.page_nbytes, np.uint8)
    for stream in spec.streams:
        if stream.name in streams:
            raw = np.frombuffer(streams[stream.name], np.uint8)
            assert len(raw) == stream.nbytes
            record[stream.offset : stream.offset + stream.nbytes] = raw
    return record


@given(st.integers(1, 8), st.integers(1, 130), st.data())
def test_codes_come_out_as_they_went_in(bits: int, dim: int, data: st.DataObject) -> None:
    codes = st.lists(st.integers(0, (1 << bits) - 1), min_size=dim, max_size=dim)
    rows = data.draw(st.lists(codes, min_size=1, max_size=3))
    raw = np.array([list(packed(row, bits)) for row in rows], np.uint8)
    assert unpack_codes(raw, bits, dim).tolist() == rows


@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_codes_are_counted(bits: int) -> None:
    spec = spec_of(f"mse{bits}")
    rows = np.random.default_rng(bits).binomial((1 << bits) - 1, 0.4, (8, 80)).tolist()
    raw = b"".join(packed(row, bits) for row in rows)
    stats = page_stats(record_of(spec, key_codes=raw), spec)[0]
    flat = [code for row in rows for code in row]
    counts = Counter(flat)
    assert stats.stream.name == "key_codes"
    assert stats.bits == bits
    assert stats.counts == tuple(counts[code] for code in range(1 << bits))
    assert stats.num_elements == len(flat) == 640
    assert stats.num_zeros == counts[0]
    assert (stats.minimum, stats.maximum) == (min(flat), max(flat))
    assert stats.mean == pytest.approx(sum(flat) / 640)
    entropy = -sum(n / 640 * log2(n / 640) for n in counts.values())
    assert stats.entropy == pytest.approx(entropy)


def test_prod_codes_take_one_bit_less_and_signs_one() -> None:
    spec = spec_of("prod4", dim=96)
    signs = bytes([0b10110000]) * 96
    by_name = {one.stream.name: one for one in page_stats(record_of(spec, key_signs=signs), spec)}
    assert by_name["key_codes"].bits == 3
    assert by_name["key_codes"].num_elements == 2 * 4 * 96
    assert by_name["key_signs"].bits == 1
    assert by_name["key_signs"].counts == (480, 288)
    assert by_name["key_codes"].counts == (768, *[0] * 7)
    assert by_name["key_codes"].entropy == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_are_measured(dtype: str) -> None:
    spec = spec_of("exact", dtype=dtype)
    numbers = np.random.default_rng(1).normal(3, 10, 640).astype(np.float32)
    numbers[:7] = 0
    raw = numbers.astype(np.float16) if dtype == "float16" else numbers
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32) & np.uint32(0xFFFF0000)
        numbers, raw = bits.view(np.float32), (bits >> 16).astype(np.uint16)
    numbers = raw.astype(np.float64) if dtype == "float16" else numbers.astype(np.float64)
    stats = page_stats(record_of(spec, key_exact=raw.tobytes()), spec)[0]
    assert stats.bits is None
    assert stats.entropy is None
    assert (stats.minimum, stats.maximum) == (numbers.min(), numbers.max())
    assert stats.mean == pytest.approx(numbers.mean())
    assert stats.std == pytest.approx(numbers.std())
    assert stats.num_zeros == 7
    assert sum(stats.counts) == 640
    edges = np.linspace(numbers.min(), numbers.max(), NUM_BINS + 1)
    inner = np.searchsorted(edges[1:-1], numbers, side="right")
    assert stats.counts == tuple(np.bincount(inner, minlength=NUM_BINS))


def test_what_is_not_finite_is_counted_apart() -> None:
    spec = spec_of("exact")
    numbers = np.ones(640, np.float32)
    numbers[:5], numbers[5:7], numbers[7] = np.nan, np.inf, -np.inf
    stats = page_stats(record_of(spec, key_exact=numbers.tobytes()), spec)[0]
    assert (stats.num_nan, stats.num_infinite) == (5, 3)
    assert (stats.minimum, stats.maximum, stats.mean, stats.std) == (1, 1, 1, 0)
    assert stats.counts == (632,)
    numbers[:] = np.nan
    stats = page_stats(record_of(spec, key_exact=numbers.tobytes()), spec)[0]
    assert stats.minimum is None
    assert stats.counts == ()


@pytest.mark.parametrize(
    "numbers",
    [
        [3e38, -3e38],
        [1.0, float(np.nextafter(np.float32(1), np.float32(2)))],
        [1e-45, 0.0],
        [1e30, 1e30],
    ],
)
def test_extreme_numbers_have_a_histogram(numbers: list[float]) -> None:
    spec = spec_of("exact")
    raw = np.array(numbers * 320, np.float32).tobytes()
    stats = page_stats(record_of(spec, key_exact=raw), spec)[0]
    assert sum(stats.counts) == 640
    assert histogram_table(stats, unicode=True).row_count == len(stats.counts)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=256), st.integers(1, 64))
def test_rebinning_loses_nothing(counts: list[int], num_bins: int) -> None:
    bins = rebinned(tuple(counts), num_bins)
    assert sum(bins) == sum(counts)
    assert len(bins) <= num_bins


def test_bars_are_as_high_as_their_counts() -> None:
    assert small_bars([0, 1, 4, 8], unicode=True) == " ▁▄█"
    assert small_bars([0, 1, 10**9], unicode=False) == " .@"
    assert small_bars([0, 0], unicode=True) == "  "
    assert small_bars([], unicode=True) == ""
    assert long_bar(8, 8, unicode=False) == "#" * 40
    assert long_bar(1, 10**6, unicode=True) == "▏"
    assert long_bar(0, 8, unicode=True) == long_bar(0, 0, unicode=False) == ""
    assert len(long_bar(5, 8, unicode=True)) == 25


@pytest.mark.parametrize("keys", ["mse4+mean+out7", "prod3+out5", "split4.5+mean"])
def test_every_stream_of_codes_with_options_is_counted_by_its_own_width(keys: str) -> None:
    """All bits set: each row's codes are the largest of their width, and none is left over."""
    spec = spec_of(keys)
    ones = {stream.name: b"\xff" * stream.nbytes for stream in spec.streams}
    stats = {one.stream.name: one for one in page_stats(record_of(spec, **ones), spec)}
    counted = {name: one for name, one in stats.items() if one.bits is not None}
    assert {"key_codes", "key_outlier_codes", "key_outlier_channels"} <= set(counted)
    assert ("key_mean_codes" in counted) == ("mean" in keys)
    apart = stats["key_outlier_codes"].num_elements
    assert stats["key_codes"].num_elements + apart == 2 * 4 * 80
    for one in counted.values():
        assert one.minimum == one.maximum == 2 ** (one.bits or 0) - 1
        rows = one.num_elements // int(np.prod(one.stream.shape[:-1]))
        assert one.stream.shape[-1] == -(-rows * (one.bits or 0) // 8)
