"""Pictures of counts: a line of small bars for a table's cell, and a histogram of long ones."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tqstore.cli.output import table
from tqstore.cli.printable import number
from tqstore.cli.stream_stats import NUM_BINS, StreamStats, rebinned

_LEVELS = " ▁▂▃▄▅▆▇█"
_ASCII_LEVELS = " .:-=+*#@"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR_WIDTH = 40


def small_bars(counts: Sequence[int], *, unicode: bool) -> str:
    """One character a count, as high as its share of the largest; only 0 is blank."""
    levels = _LEVELS if unicode else _ASCII_LEVELS
    top = max(counts, default=0)
    return "".join(levels[-(-count * 8 // top) if top else 0] for count in counts)


def long_bar(count: int, top: int, *, unicode: bool) -> str:
    """A horizontal bar, `_BAR_WIDTH` characters long for `top`."""
    if not unicode:
        return "#" * -(-count * _BAR_WIDTH // top) if top else ""
    eighths = -(-count * _BAR_WIDTH * 8 // top) if top else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def histogram_table(stats: StreamStats, *, unicode: bool) -> Table:
    """Every bin of a stream on a line of its own."""
    bins = rebinned(stats.counts, NUM_BINS)
    made = table(
        "CODES" if stats.bits else "FROM",
        "COUNT",
        "SHARE",
        "",
        right=("CODES", "FROM", "COUNT", "SHARE"),
    )
    top, total = max(bins, default=0), sum(bins)
    for label, count in zip(_labels(stats, len(bins)), bins, strict=True):
        share = f"{100 * count / total:.1f}%"
        made.add_row(label, f"{count:,}", share, long_bar(count, top, unicode=unicode))
    return made


def _labels(stats: StreamStats, num_bins: int) -> list[str]:
    if stats.bits is not None:
        width = len(stats.counts) // num_bins
        firsts = range(0, len(stats.counts), width)
        return [str(a) if width == 1 else f"{a}-{a + width - 1}" for a in firsts]
    if stats.minimum is None or stats.maximum is None:
        return []
    step = (stats.maximum - stats.minimum) / num_bins
    return [number(stats.minimum + i * step) for i in range(num_bins)]
