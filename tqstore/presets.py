"""Named pairs of key and value codecs, chosen on a real model (docs/quantization.md, "Presets").

A preset's name stands wherever a codec's string does: as `keys` it is its key codec, as `values`
its value codec.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqstore.codec_spec import CodecSpec


@dataclass(frozen=True)
class Preset:
    """A pair of codec strings, and what it is for."""

    keys: str
    values: str
    purpose: str


PRESETS = {
    "card": Preset("prod4", "int8", "TurboQuant as published"),
    "small": Preset("mse3+mean+out32", "mse3", "the fewest bytes that still answer well"),
    "balanced": Preset("mse4+mean+out16", "mse4", "the default choice below 4.5 bits"),
    "near-lossless": Preset("uni8+mean", "uni8", "as good as uncompressed"),
    "exact": Preset("exact", "exact", "the model's own bytes"),
}


def codec_for(role: str, text: str | CodecSpec) -> CodecSpec:
    """The codec that `text`, a codec's string or a preset's name, means for `keys` or `values`.

    Raises InvalidInput for a string that names neither.
    """
    if isinstance(text, str) and text in PRESETS:
        text = getattr(PRESETS[text], role)
    return CodecSpec.parse(text)
