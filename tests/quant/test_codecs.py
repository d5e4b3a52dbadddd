"""What every codec keeps whatever its mathematics: layouts, products, splits, dtypes, extremes."""

import mlx.core as mx
import numpy as np
import pytest

from tests.quant.cases import (
    ALL,
    PLAIN,
    ROTATED,
    SOME,
    codec_of,
    fitting,
    page_spec,
    relative_error,
    vectors,
)
from tqstore.quant import runwise

DIMS = (1, 2, 8, 64, 80, 96, 100, 112, 128, 192, 256, 576)
MX_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def as_words(streams: dict[str, mx.array]) -> dict[str, mx.array]:
    """Packed streams as the hot pool shows them: strided views of one array of uint32 records."""
    views = {}
    for name, stream in streams.items():
        if name in ("codes", "signs") and stream.shape[-1] % 4 == 0:
            pages, heads, tokens, row = stream.shape
            words = mx.view(stream, mx.uint32).reshape(pages, -1)
            record = mx.concatenate([mx.full((pages, 3), 7, mx.uint32), words], axis=1)
            shape = (pages, heads, tokens, row // 4)
            strides = (record.shape[1], tokens * row // 4, row // 4, 1)
            views[name] = mx.as_strided(record, shape, strides, 3)
        else:
            views[name] = stream
    return views


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize(("name", "dim"), fitting(ALL, DIMS))
def test_streams_are_the_page_specs(name: str, dim: int, role: str) -> None:
    spec = page_spec(name, dim)
    streams = codec_of(spec, role).encode(vectors(3, 2, 16, dim))
    expected = {
        stream.name.removeprefix(f"{role}_"): (stream.dtype, (3, *stream.shape))
        for stream in spec.streams
        if stream.name.startswith(f"{role}_")
    }
    found = {n: (str(s.dtype).removeprefix("mlx.core."), s.shape) for n, s in streams.items()}
    assert found == expected


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize(("name", "dim"), fitting(ALL, DIMS))
def test_products_are_those_of_decoded_vectors(name: str, dim: int, rows: int) -> None:
    codec = codec_of(page_spec(name, dim))
    streams = codec.encode(vectors(3, 2, 16, dim))
    decoded = codec.decode(streams)
    queries, weights = vectors(2, rows, dim, seed=1), vectors(3, 2, rows, 16, seed=2)
    scores = codec.scores(codec.prepare(queries), streams)
    summed = codec.finish(codec.weighted_sum(weights, streams))
    size = (
        mx.linalg.norm(queries, axis=-1)[None, :, :, None]
        * mx.linalg.norm(decoded, axis=-1)[:, :, None, :]
    )
    assert scores.dtype == summed.dtype == mx.float32
    assert mx.all(mx.abs(scores - queries[None] @ decoded.swapaxes(-1, -2)) <= 2e-6 * size + 1e-9)
    assert mx.allclose(summed, (weights @ decoded).sum(0), atol=2e-4, rtol=1e-5)
    words = as_words(streams)
    assert mx.array_equal(codec.decode(words), decoded)
    assert mx.array_equal(codec.scores(codec.prepare(queries), words), scores)
    assert mx.array_equal(codec.finish(codec.weighted_sum(weights, words)), summed)


@pytest.mark.parametrize("rotation", ["auto", "haar"])
@pytest.mark.parametrize("name", SOME)
def test_pages_encoded_apart_are_bit_identical(
    name: str, rotation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = page_spec(name, 128, tokens=8, rotation=rotation)
    codec = codec_of(spec)
    x = vectors(12, 2, 8, 128)
    whole = codec.encode(x)
    for size in (1, 5):
        parts = [codec.encode(x[start : start + size]) for start in range(0, 12, size)]
        for stream in whole:
            assert mx.array_equal(mx.concatenate([p[stream] for p in parts]), whole[stream])
    monkeypatch.setattr(runwise, "CPU_RUN_NBYTES", 1)
    monkeypatch.setattr(runwise, "GPU_RUN_NBYTES", 1)
    for stream, array in codec.encode(x).items():
        assert mx.array_equal(array, whole[stream])
    assert mx.array_equal(
        codec.decode(whole)[3:4], codec.decode({n: s[3:4] for n, s in whole.items()})
    )


@pytest.mark.parametrize("name", SOME)
def test_runs_of_pages_change_no_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of(page_spec(name, 96, tokens=8))
    streams = codec.encode(vectors(5, 2, 8, 96))
    queries, weights = codec.prepare(vectors(2, 3, 96, seed=1)), vectors(5, 2, 3, 8, seed=2)
    scores, summed = codec.scores(queries, streams), codec.weighted_sum(weights, streams)
    monkeypatch.setattr(runwise, "CPU_RUN_NBYTES", 2 * 2 * 8 * 96 * 4)
    monkeypatch.setattr(runwise, "GPU_RUN_NBYTES", 2 * 2 * 8 * 96 * 4)
    assert mx.allclose(codec.scores(queries, streams), scores, atol=1e-4)
    assert mx.allclose(codec.weighted_sum(weights, streams), summed, atol=1e-4)


@pytest.mark.parametrize("dtype", MX_DTYPES)
@pytest.mark.parametrize("name", SOME)
def test_every_model_dtype(name: str, dtype: str) -> None:
    codec = codec_of(page_spec(name, 64, dtype=dtype))
    x = vectors(2, 2, 16, 64).astype(MX_DTYPES[dtype])
    decoded = codec.decode(codec.encode(x))
    if name == "exact":
        assert decoded.dtype == x.dtype
        assert mx.array_equal(decoded, x)
    else:
        same = codec.decode(codec.encode(x.astype(mx.float32)))
        assert decoded.dtype == mx.float32
        assert mx.array_equal(decoded, same)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e30])
@pytest.mark.parametrize("name", [name for name in ALL if name != "exact"])
def test_any_norm_is_kept_as_well_as_norm_one(name: str, size: float) -> None:
    codec = codec_of(page_spec(name, 128))
    x = vectors(2, 2, 16, 128)
    one = codec.decode(codec.encode(x))
    scaled = codec.decode(codec.encode(x * size))
    # fp16 scales relative to a power of two: the same numbers up to one rounding of the scale.
    if name in PLAIN:  # a mean may come to be coded by other levels, an equally good choice
        assert relative_error(scaled / size, one) < 1e-4 + 0.2 * relative_error(one, x)
    assert relative_error(scaled / size, x) < 1.02 * relative_error(one, x) + 1e-6


@pytest.mark.parametrize("power", [-96, -20, 20, 100])
@pytest.mark.parametrize("name", SOME)
def test_a_power_of_two_changes_only_the_unit(name: str, power: int) -> None:
    codec = codec_of(page_spec(name, 128))
    x = vectors(2, 2, 16, 128)
    streams, scaled = codec.encode(x), codec.encode(x * 2.0**power)
    for stream in streams:
        factor = 2.0**power if stream.endswith("units") or stream == "exact" else 1
        assert mx.array_equal(scaled[stream], streams[stream] * factor)


@pytest.mark.parametrize("name", PLAIN)
def test_zero_vectors_decode_to_zero_and_disturb_no_other(name: str) -> None:
    codec = codec_of(page_spec(name, 64))
    x = vectors(2, 2, 16, 64)
    mask = (mx.arange(16) % 3 != 0)[None, None, :, None]
    decoded = codec.decode(codec.encode(x * mask))
    assert mx.all(mx.where(mask, 0, decoded) == 0)
    alone = codec.decode(codec.encode(x))
    assert mx.allclose(mx.where(mask, decoded - alone, 0), mx.array(0.0), atol=2e-3)
    nothing = codec.encode(mx.zeros((1, 2, 16, 64)))
    assert mx.all(codec.decode(nothing) == 0)
    assert mx.all(codec.scores(codec.prepare(x[0]), nothing) == 0)


def extreme_pages(dtype: str, dim: int) -> np.ndarray:
    """[pages, 1, 8, dim] of finite values that overflow or underflow careless arithmetic."""
    limit = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38}[dtype]
    tiny = {"float16": 6e-8, "bfloat16": 1e-40, "float32": 1e-45}[dtype]
    signs = np.sign(np.random.default_rng(0).normal(size=(1, 8, dim)))
    one_hot = np.zeros((1, 8, dim))
    one_hot[..., 0] = limit
    mixed = signs * np.geomspace(tiny, limit, 8)[None, :, None]
    return np.stack([signs * limit, signs * tiny, one_hot, mixed, -one_hot, signs * 0])


@pytest.mark.parametrize(("name", "dim"), fitting(ALL, (1, 8, 80, 128)))
@pytest.mark.parametrize("dtype", MX_DTYPES)
def test_finite_extremes_never_decode_to_nan_or_infinity(name: str, dtype: str, dim: int) -> None:
    codec = codec_of(page_spec(name, dim, heads=1, tokens=8, dtype=dtype))
    x = mx.array(extreme_pages(dtype, dim).astype(np.float32)).astype(MX_DTYPES[dtype])
    streams = codec.encode(x)
    decoded = codec.decode(streams)
    assert mx.all(mx.isfinite(decoded))
    assert mx.all(mx.isfinite(decoded.astype(x.dtype)))
    for stream in streams.values():
        assert mx.all(mx.isfinite(stream.astype(mx.float32)))
    weighted = codec.weighted_sum(mx.full((6, 1, 2, 8), 1e-3), streams)
    assert not mx.any(mx.isnan(weighted))


@pytest.mark.parametrize("name", [*ROTATED, "int8"])
def test_largest_floats_are_kept_as_well_as_others(name: str) -> None:
    codec = codec_of(page_spec(name, 128, heads=1, tokens=8))
    x = vectors(1, 1, 8, 128)
    factor = 1e38 / mx.max(mx.abs(x)).item()
    error = relative_error(codec.decode(codec.encode(x * factor)) / factor, x)
    assert error < 1.05 * relative_error(codec.decode(codec.encode(x)), x) + 1e-6


@pytest.mark.parametrize("name", ["prod4", "mse4", "uni4", "int8"])
def test_a_vector_far_below_its_page_decodes_to_zero_not_to_noise(name: str) -> None:
    codec = codec_of(page_spec(name, 128, heads=1))
    x = vectors(1, 1, 16, 128)
    for ratio, is_kept in ((1e-4, True), (1e-20, False)):
        sizes = mx.where(mx.arange(16) == 3, ratio, 1.0)[None, None, :, None]
        small = codec.decode(codec.encode(x * sizes))[0, 0, 3]
        if is_kept:
            assert relative_error(small, x[0, 0, 3] * ratio) < 0.05
        else:
            assert mx.all(small == 0)


@pytest.mark.parametrize("name", SOME)
def test_codecs_are_memoised_and_differ_by_seed_and_side(name: str) -> None:
    spec = page_spec(name, 64)
    assert codec_of(spec) is codec_of(page_spec(name, 64, heads=5, tokens=3))
    if name in ("exact", "int8"):
        return
    x = vectors(1, 2, 16, 64)
    codes = "signs" if name == "prod1" else "codes"
    streams = [codec_of(spec, role, seed).encode(x)[codes] for role, seed in SIDES]
    for i, first in enumerate(streams):
        assert not any(mx.array_equal(first, second) for second in streams[:i])


SIDES = [("key", 0), ("value", 0), ("key", 1)]


def test_int8_is_never_off_by_more_than_half_a_step_and_its_rounding() -> None:
    codec = codec_of(page_spec("int8", 100))
    x = vectors(4, 2, 16, 100)
    streams = codec.encode(x)
    step = streams["scales"].astype(mx.float32) * streams["units"][..., None]
    assert mx.all(mx.abs(codec.decode(streams) - x) <= 0.57 * step[..., None])
    assert mx.min(streams["codes"]).item() >= 1


@pytest.mark.parametrize(("name", "power"), [("int8", -22), ("prod7", -33)])
def test_codes_are_taken_against_the_rounded_scale(name: str, power: int) -> None:
    """Where scales keep only a few bits, coding against unrounded ones would cost several times."""
    codec = codec_of(page_spec(name, 128, heads=1, tokens=256))
    x = vectors(1, 1, 256, 128)
    sizes = mx.where(mx.arange(256) == 0, 1.0, 2.0**power)[None, None, :, None]
    small = codec.decode(codec.encode(x * sizes))[:, :, 1:] * 2.0**-power
    alone = codec.decode(codec.encode(x))[:, :, 1:]
    assert relative_error(small, x[:, :, 1:]) < 1.6 * relative_error(alone, x[:, :, 1:])
