"""The figures as Markdown between the markers of two documents, and as a plot beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT = DOCS / "quality.md"
PLOT = DOCS / "quality.svg"
CHOICES_DOCUMENT = DOCS / "quantization.md"
BEGIN = "<!-- figures: tools/quality --docs -->\n"
END = "<!-- end of figures -->\n"
TEXTS = ("story", "manual", "code")
LEAST_DRAWN = 1e-6  # below is rounding: `exact`
Entry = dict[str, Any]


def is_complete(entry: Entry) -> bool:
    """Measured on every text."""
    return all("kl" in entry.get(text, {}) for text in TEXTS)


def mean_kl(entry: Entry) -> float:
    return fmean(entry[text]["kl"] for text in TEXTS)


def quality_table(rows: dict[str, Entry], dense: dict[str, float]) -> list[str]:
    """One line a row; where texts differ, one figure for each."""
    head = ["cache", "keys, values (bits)", "KL, mean", *(f"KL {text}" for text in TEXTS)]
    head += ["top-1 equal", "perplexity"]
    lines = [_line(head), _line(["---"] * len(head))]
    exact = " ".join(f"{dense[text]:.2f}" for text in TEXTS)
    lines.append(_line(["dense float32", "32, 32", "0", "0", "0", "0", "1", exact]))
    for name, entry in rows.items():
        bits = f"{entry['key_bits']:.2f}, {entry['value_bits']:.2f}"
        title = f"{entry['package']}: {name}" + (f" ({entry['note']})" if entry["note"] else "")
        if not is_complete(entry):
            why = next((entry[t]["error"] for t in TEXTS if "error" in entry.get(t, {})), "")
            lines.append(_line([title, bits, why or "not measured", *[""] * 5]))
            continue
        of = [entry[text] for text in TEXTS]
        cells = [title, bits, _figure(mean_kl(entry)), *(_figure(one["kl"]) for one in of)]
        cells.append(" ".join(f"{one['top1']:.3f}" for one in of))
        cells.append(" ".join(f"{one['perplexity']:.2f}" for one in of))
        lines.append(_line(cells))
    return lines


def summary(rows: dict[str, Entry]) -> list[str]:
    """How each preset compares with mlx-lm's 4 and 8 bits, text by text."""
    lines = []
    for name, entry in rows.items():
        if not entry.get("note", "").startswith("preset") or not is_complete(entry):
            continue
        if mean_kl(entry) < LEAST_DRAWN:
            continue
        for bits in (4, 8):
            peer = rows.get(f"QuantizedKVCache {bits} bits", {})
            if is_complete(peer):
                ratios = ", ".join(
                    f"{entry[text]['kl'] / peer[text]['kl']:.2g} ({text})" for text in TEXTS
                )
                lines.append(
                    f"- {entry['note']} ({name}): KL over that of affine {bits} bits: {ratios}"
                )
    return lines


def needle_table(rows: dict[str, Entry], lengths: Sequence[int]) -> list[str]:
    """Share of the needles found at each length."""
    lines = [
        _line(["cache", *(f"{n:,} tokens" for n in lengths)]),
        _line(["---"] * (1 + len(lengths))),
    ]
    for name, entry in rows.items():
        found = [entry.get(f"needles {n}", {}).get("found") for n in lengths]
        if any(share is not None for share in found):
            cells = ["-" if share is None else f"{share:.2f}" for share in found]
            title = f"{entry['package']}: {name}" if entry["package"] else f"{name} float32"
            lines.append(_line([title, *cells]))
    return lines


def choices_table(choices: dict[str, dict[str, Any]]) -> list[str]:
    """One line a policy: mean over layers and the worst layer, for each text."""
    head = ["4-bit keys and", *(f"{text}: mean, worst layer" for text in choices)]
    lines = [_line(head), _line(["---"] * len(head))]
    for policy in next(iter(choices.values()))["policies"]:
        of = [one["policies"][policy] for one in choices.values()]
        lines.append(_line([policy, *(f"{one['mean']:.4f}, {one['largest']:.4f}" for one in of)]))
    return lines


def write_document(markdown: Sequence[str], path: Path = DOCUMENT) -> None:
    """Replaces what stands between the markers; ValueError without them."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path.name} lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    path.write_text(before + BEGIN + "\n".join(markdown) + "\n" + END + after)


def write_plot(rows: dict[str, Entry], path: Path = PLOT) -> None:
    """Mean KL over mean bits of keys and values, both axes' meaning in their labels."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tqstore"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    marks = {"tqstore": ("o", "#1f77b4"), "mlx-lm": ("s", "#d62728")}
    for name, entry in rows.items():
        if not is_complete(entry) or mean_kl(entry) < LEAST_DRAWN or "in use" in name:
            continue
        bits = (entry["key_bits"] + entry["value_bits"]) / 2
        marker, colour = marks.get(entry["package"], ("^", "#7f7f7f"))
        axes.plot(bits, mean_kl(entry), marker, color=colour)
        axes.annotate(name, (bits, mean_kl(entry)), (4, 4), textcoords="offset points", fontsize=7)
    axes.set_yscale("log")
    axes.set_xlabel("bits an element, all side data included (mean of keys and values)")
    axes.set_ylabel("KL of the next token to the dense cache, mean of three texts")
    for package, (marker, colour) in [*marks.items(), ("other TurboQuant", ("^", "#7f7f7f"))]:
        axes.plot([], [], marker, color=colour, label=package)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(value: float) -> str:
    return f"{max(value, 0.0):.2g}" if value < 1e-4 else f"{value:.4f}"
