"""`+out`, `+mean` and `split`: what is chosen, what it costs, and what it is worth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.quant.cases import codec_of, page_spec, relative_error, vectors
from tqstore.errors import InvalidInput
from tqstore.spec import CodecSpec, PageSpec

OPTIONS = ["mse4+out5", "prod4+mean+out5", "int8+out5", "split3.5", "uni4+mean+out5"]


def with_offsets(x: mx.array, channels: list[int], size: float) -> mx.array:
    offsets = np.zeros(x.shape[-1], np.float32)
    offsets[channels] = size
    return x + mx.array(offsets)


def attention_kl(keys: mx.array, decoded: mx.array, queries: mx.array) -> float:
    """Mean KL of softmax over all tokens of pages [pages, 1, tokens, dim], in float64."""
    dim = keys.shape[-1]
    logs = []
    for array in (keys, decoded):
        flat = np.array(array, np.float64).reshape(-1, dim)
        scores = np.array(queries, np.float64) @ flat.T / np.sqrt(dim)
        peak = scores.max(-1, keepdims=True)
        logs.append(scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True)))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean())


def test_the_largest_channels_of_every_page_and_head_are_kept_apart() -> None:
    x = vectors(3, 2, 16, 64)
    factors = mx.exp(vectors(3, 2, 1, 64, seed=1))
    streams = codec_of(page_spec("mse4+out5", 64)).encode(x * factors)
    magnitudes = np.abs(np.array(x * factors)).mean(-2)
    rank = np.argsort(np.argsort(-magnitudes, axis=-1), axis=-1)
    expected = np.packbits(rank < 5, axis=-1, bitorder="little")
    assert np.array_equal(np.array(streams["outlier_channels"]), expected)


def test_channels_apart_are_off_by_half_a_step_of_their_own_scale_and_touch_nothing_else() -> None:
    x = vectors(2, 2, 16, 64)
    loud = with_offsets(x, [3, 17], 1e4)
    codec = codec_of(page_spec("mse4+out2", 64))
    louder = codec.encode(with_offsets(x, [3, 17], -1e6))
    streams = codec.encode(loud)
    for name in ("codes", "scales", "units"):
        assert mx.array_equal(streams[name], louder[name])
    difference = mx.abs(codec.decode(streams) - loud)
    step = streams["outlier_scales"].astype(mx.float32) * streams["outlier_units"][..., None]
    assert mx.all(difference[..., [3, 17]] <= 0.57 * step[..., None])
    others = [channel for channel in range(64) if channel not in (3, 17)]
    assert relative_error(codec.decode(streams)[..., others], x[..., others]) < 0.012


@pytest.mark.parametrize("name", OPTIONS)
def test_pages_with_different_channels_decode_and_multiply_together_as_apart(name: str) -> None:
    codec = codec_of(page_spec(name, 64))
    x = vectors(2, 2, 16, 64)
    apart = [with_offsets(x, channels, 40) for channels in ([1, 2], [60], [9, 30, 31])]
    coded = [codec.encode(one) for one in apart]
    together = {key: mx.concatenate([one[key] for one in coded]) for key in coded[0]}
    decoded = mx.concatenate([codec.decode(one) for one in coded])
    assert mx.array_equal(codec.decode(together), decoded)
    for rows in (1, 5, 16, 17, 40):
        queries, weights = vectors(2, rows, 64, seed=3), vectors(6, 2, rows, 16, seed=4)
        scores = codec.scores(codec.prepare(queries), together)
        expected = queries[None] @ decoded.swapaxes(-1, -2)
        assert mx.allclose(scores, expected, rtol=1e-5, atol=3e-3)
        summed = codec.finish(codec.weighted_sum(weights, together))
        assert mx.allclose(summed, (weights @ decoded).sum(0), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("name", ["mse3+mean", "prod4+mean", "int8+mean", "split2.5+mean"])
def test_a_mean_takes_a_common_offset_away(name: str) -> None:
    x = vectors(2, 2, 64, 128)
    common = 30 * vectors(2, 2, 1, 128, seed=5)
    centred, plain = (codec_of(page_spec(n, 128, tokens=64)) for n in (name, name[:-5]))
    size = mx.sum(mx.square(x)).item()

    def error(codec: object, y: mx.array) -> float:
        decoded = codec.decode(codec.encode(y))  # type: ignore[attr-defined]
        return mx.sum(mx.square(decoded - y)).item() / size

    # What is left of the offset is the error of four bits: sqrt(.0093) of it.
    assert error(centred, x + common) < 12 * error(plain, x)
    assert error(centred, x + common) < error(plain, x + common) / 50
    assert error(centred, x) < 1.03 * error(plain, x)


def rope_pairs(x: mx.array, pairs: list[int], size: float, base: float = 1e4) -> mx.array:
    """Keys with offsets that RoPE turned: channels (i, i + dim/2) at frequency base^(-2i/dim)."""
    pages, _, tokens, dim = x.shape
    turned = np.array(x)
    positions = np.arange(pages * tokens).reshape(pages, 1, tokens)
    for pair in pairs:
        angle = positions * base ** (-2 * pair / dim)
        turned[..., pair] += size * np.cos(angle)
        turned[..., pair + dim // 2] += size * np.sin(angle)
    return mx.array(turned)


OFFSETS = {
    "fixed": lambda x, size: with_offsets(x, [5, 40, 77, 101], size),
    "high": lambda x, size: rope_pairs(x, [0, 1, 3, 5], size),
    "middle": lambda x, size: rope_pairs(x, [25, 28, 31, 36], size),
    "low": lambda x, size: rope_pairs(x, [55, 58, 60, 63], size),
}


@pytest.mark.parametrize(
    ("size", "plain", "factor"),
    # At 20 times the rest plain `mse3` is 13 times worse than without offsets, so no 3 bits can be
    # 20 times better; the card's `prod3` is.
    [(20, "prod3", 20), (20, "mse3", 10), (40, "mse3", 20), (40, "prod3", 60)],
)
@pytest.mark.parametrize("kind", OFFSETS)
def test_what_large_offsets_cost_is_taken_back(
    kind: str, size: float, plain: str, factor: float
) -> None:
    keys = OFFSETS[kind](vectors(8, 1, 64, 128), size)
    queries = vectors(64, 128, seed=1)
    errors = [
        attention_kl(keys, codec.decode(codec.encode(keys)), queries)
        for name in ("mse3+mean+out16", plain)
        for codec in [codec_of(page_spec(name, 128, heads=1, tokens=64))]
    ]
    assert errors[0] <= errors[1] / factor


@pytest.mark.parametrize("name", ["prod3+mean+out5", "prod2+mean"])
def test_inner_products_of_prod_stay_unbiased_with_options(name: str) -> None:
    """Over 1,000 vectors of as many rotations: every seed is one, every page one vector."""
    x = with_offsets(vectors(1, 1, 4, 24), [2, 3, 11, 19, 20], 8)
    query = vectors(1, 1, 24, seed=1)
    errors = []
    for seed in range(1000):
        codec = codec_of(page_spec(name, 24, heads=1, tokens=4), seed=seed)
        scores = codec.scores(codec.prepare(query), codec.encode(x))
        errors.append(scores - query[None] @ x.swapaxes(-1, -2))
    found = np.array(mx.concatenate(errors)).reshape(1000, 4)
    # int8 channels have a rounding error of their own that no rotation averages.
    rounding = 0.0 if "out" not in name else 0.05
    bias, spread = found.mean(0), found.std(0) / np.sqrt(1000)
    assert np.all(np.abs(bias) <= 4 * spread + rounding)


@pytest.mark.parametrize(
    "name", ["mse4+mean+out5", "prod4+mean+out5", "int8+mean", "split2.5+mean"]
)
@pytest.mark.parametrize("value", [0.0, 1.0, -3e4])
def test_pages_of_zeros_and_of_constants(name: str, value: float) -> None:
    codec = codec_of(page_spec(name, 64, dtype="float16"))
    x = mx.full((1, 2, 16, 64), value)
    decoded = codec.decode(codec.encode(x))
    assert relative_error(decoded, x) < 0.002 if value else mx.all(decoded == 0)


def test_numbers_too_large_to_centre_are_coded_without_a_mean() -> None:
    codec = codec_of(page_spec("mse4+mean", 64))
    x = mx.sign(vectors(1, 1, 16, 64)) * 3e38
    streams = codec.encode(mx.concatenate([x, x * 1e-38], axis=0))
    assert mx.all(streams["mean_scales"][0] == 0)
    assert mx.all(streams["mean_scales"][1] > 0)
    assert relative_error(codec.decode(streams)[:1] * 1e-38, x * 1e-38) < 0.02


@pytest.mark.parametrize("bits", [0, 255])
def test_more_or_fewer_channels_than_there_are_do_not_read_beyond_the_vectors(bits: int) -> None:
    codec = codec_of(page_spec("mse4+out5", 64))
    streams = codec.encode(vectors(1, 2, 16, 64))
    streams["outlier_channels"] = mx.full((1, 2, 8), bits, mx.uint8)
    assert mx.all(mx.isfinite(codec.decode(streams)))


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("mse4", 4 + 32 / 256),
        ("mse4+mean", 4 + 32 / 256 + 0.0625),
        ("mse4+out16", (240 * 4 + 16 * 8 + 32) / 256),
        ("mse4+mean+out16", (240 * 4 + 16 * 8 + 32) / 256 + 0.0625),
        ("prod4+mean+out16", (240 * 4 + 16 * 8 + 48) / 256 + 0.0625),
        ("int8+mean", 8 + 16 / 256 + 0.0625),
        ("split2.5", (64 * 3 + 192 * 2 + 32) / 256),
    ],
)
def test_bits_are_what_pages_take(text: str, bits: float) -> None:
    """One head of 256, the worst case: padding and units are at most .04 bits more."""
    spec = PageSpec(1, 256, 256, 64, CodecSpec.parse(text), CodecSpec.parse(text), "float32")
    apart = 16 / 256 if text in ("mse4", "mse4+mean") else 0  # one scale a vector, not two
    assert bits - apart <= spec.key_bits <= bits - apart + 0.04
    total = (spec.key_bits + spec.value_bits) / 2
    assert spec.page_bits == pytest.approx(total + 64 * 8 / (64 * 512))


@pytest.mark.parametrize(
    ("codec", "dim", "what"),
    [
        ("mse4+out8", 8, "of only 8"),
        ("prod4+out9", 8, "of only 8"),
        ("int8+out1", 1, "of only 1"),
        ("split2.5", 1, "not a multiple of 4"),
        ("split3.5+mean", 6, "not a multiple of 4"),
    ],
)
def test_channels_that_do_not_fit_are_refused_when_the_page_is_described(
    codec: str, dim: int, what: str
) -> None:
    with pytest.raises(InvalidInput, match=what):
        page_spec(codec, dim)


@pytest.mark.parametrize(
    "codec",
    [
        *["exact+mean", "exact+out4", "mse4+gauss", "mse4+out0", "mse4+out", "mse4+out04"],
        *["split8.5", "split2.5+out3", "split2", "mse4+mean+mean", "mse4+out3+out4", "mse4+gaus"],
    ],
)
def test_strings_that_name_no_codec(codec: str) -> None:
    with pytest.raises(InvalidInput):
        CodecSpec.parse(codec)


def test_options_come_in_any_order_and_mean_the_same() -> None:
    assert CodecSpec.parse("prod4+out3+mean+gauss") == CodecSpec.parse("prod4+gauss+mean+out3")
    assert str(CodecSpec.parse("prod4+out3+mean+gauss")) == "prod4+gauss+mean+out3"
    assert str(CodecSpec.parse("split2.5+mean")) == "split2.5+mean"


def test_a_hadamard_rotation_of_the_rest_must_exist() -> None:
    page_spec("mse4+mean+out32", 128, rotation="hadamard")
    with pytest.raises(InvalidInput, match="size 112"):
        page_spec("mse4+out16", 128, rotation="hadamard")
