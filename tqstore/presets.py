"""Named pairs of key and value codecs, chosen on a real model (docs/quantization.md, "Presets").

A preset's name stands wherever a codec's string does: as `keys` it is its key codec, as `values`
its value codec.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqstore.codec_spec import CodecSpec
from tqstore.errors import InvalidInput


@dataclass(frozen=True)
class Preset:
    """A pair of codec strings, and what it is for."""

    keys: str
    values: str
    purpose: str


PRESETS = {
    "card": Preset("prod4", "int8", "TurboQuant as published"),
    "small": Preset(
        "split3.5+mean", "mse3", "fewest bytes: better answers than affine 4 bits at a quarter less"
    ),
    "balanced": Preset(
        "split4.5+mean", "mse4", "answers near the dense ones at the size of affine 4 bits"
    ),
    "near-lossless": Preset("uni8+mean", "uni8", "differences that no text shows"),
    "exact": Preset("exact", "exact", "the model's own bytes"),
}
# What an mlx-lm model's cache gets unless it is told: the measured best at about 4.5 bits.
DEFAULT_PRESET = "balanced"


def preset_codecs(name: str) -> Preset:
    """Raises InvalidInput for a name that is not a preset's."""
    if name not in PRESETS:
        raise InvalidInput(f"unknown preset {name!r}", remedy=f"Use {', '.join(PRESETS)}")
    return PRESETS[name]


def codec_for(role: str, text: str | CodecSpec) -> CodecSpec:
    """The codec that `text`, a codec's string or a preset's name, means for `keys` or `values`.

    Raises InvalidInput for a string that names neither.
    """
    if isinstance(text, str) and text in PRESETS:
        preset = PRESETS[text]
        text = preset.keys if role == "keys" else preset.values
    try:
        return CodecSpec.parse(text)
    except InvalidInput as error:
        remedy = f"{error.remedy}; or a preset: {', '.join(PRESETS)}"
        raise InvalidInput(error.problem, doing=f"choosing {role}", remedy=remedy) from None
