"""A conversion with a progress bar, and its report as a table or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tqstore.cli.output import console, print_json, table
from tqstore.cli.printable import counted, number, printable, size
from tqstore.store.page_store import PageStore
from tqstore.transcode import SideReport, TranscodeReport, transcode


def convert_with_progress(
    store: PageStore, name: str, keys: str | None, values: str | None, to: str | None
) -> TranscodeReport:
    """The bar, on a terminal, moves with the pages written."""
    err = console(is_stderr=True)
    columns = (
        TextColumn("converting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("pages"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return transcode(store, name, keys=keys, values=values, to=to, on_pages=advance)


def show_conversion(source: str, report: TranscodeReport, *, as_json: bool) -> None:
    if as_json:
        sides = {
            name: {**asdict(side), "was_lossy": side.was_lossy} for name, side in _sides(report)
        }
        print_json({"source": source, **asdict(report), **sides, "losses": _losses(report)})
        return
    out = console()
    made = table("SIDE", "BEFORE", "AFTER", "LAYERS", "ERROR", right=("LAYERS", "ERROR"))
    for row in _rows(report):
        made.add_row(*row)
    out.print(made)
    out.print()
    out.print(
        f"session {printable(report.session)}, checkpoint {report.sequence}: "
        f"{counted(report.num_tokens, 'token')}; {counted(report.num_pages, 'page')} of "
        f"{size(report.nbytes_before)} became {size(report.nbytes_after)}"
    )
    for line in _losses(report):
        out.print(line)


def _sides(report: TranscodeReport) -> tuple[tuple[str, SideReport], ...]:
    return (("keys", report.keys), ("values", report.values))


def _rows(report: TranscodeReport) -> Iterator[tuple[str, str, str, str, str]]:
    """One row for each pair of codecs of a side, with the worst error of its layers."""
    for name, side in _sides(report):
        for pair in dict.fromkeys(side.codecs):
            layers = [layer for layer, codecs in enumerate(side.codecs) if codecs == pair]
            errors = [side.relative_errors[layer] for layer in layers]
            worst = max((error for error in errors if error is not None), default=None)
            said = "copied" if pair[0] == pair[1] else number(worst)
            yield name, *pair, str(len(layers)), said


def _losses(report: TranscodeReport) -> list[str]:
    """What was lost, one sentence a side."""
    return [line for name, side in _sides(report) for line in _loss(name, side)]


def _loss(name: str, side: SideReport) -> Iterator[str]:
    if side.is_copied:
        return
    error = side.worst_error
    if error is None:
        yield f"{name}: nothing was in pages yet"
        return
    olds = ", ".join(dict.fromkeys(old for old, new in side.codecs if old not in ("exact", new)))
    here = f"off by {100 * error:.2g}% (root mean square, worst layer)"
    if not side.was_lossy:
        yield f"{name}: {here}" if error else f"{name}: nothing was lost"
    elif error:
        yield f"{name}: {here}, on top of what {olds} had lost before"
    else:
        yield f"{name}: nothing more was lost; what {olds} had lost before stays lost"
