"""The rows as a table for people, and as Markdown between the markers of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from tools.benchmarks.row import Row

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
BEGIN = "<!-- figures: tools/bench --docs -->\n"
END = "<!-- end of figures -->\n"
COLUMNS = ("name", "tqstore", "peer's", "unit", "ratio", "bar", "peer")


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS."""
    return (
        row.name,
        figure(row.value),
        figure(row.peer_value),
        row.unit,
        figure(row.ratio),
        row.verdict,
        row.peer,
    )


def figure(value: float | None) -> str:
    """Three significant digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> Table:
    drawn = Table(title="tqstore against its peers (medians)", title_justify="left")
    for column in COLUMNS:
        is_number = column in ("tqstore", "peer's", "ratio")
        drawn.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        style = None if row.is_met is None else ("green" if row.is_met else "red")
        drawn.add_row(*cells(row), style=style)
    return drawn


def markdown(rows: Sequence[Row], machine: Sequence[str]) -> str:
    lines = [f"{line}.  " for line in machine]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    lines.append("")
    lines += [f"- {row.name}: {row.note}" for row in rows if row.note]
    return "\n".join(lines) + "\n"


def replaced(text: str, rows: Sequence[Row], machine: Sequence[str]) -> str:
    """`text` with what stands between the markers replaced; ValueError without the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + BEGIN + markdown(rows, machine) + END + after


def write_document(rows: Sequence[Row], machine: Sequence[str], path: Path = DOCUMENT) -> None:
    path.write_text(replaced(path.read_text(), rows, machine))
