"""Measures how well the real model answers with each cache.  No figure here is typed by hand.

Every figure is kept in the JSON file as soon as it is there, so a run that is stopped goes on where
it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tools import real_model
from tools.answer_quality import choices, forward, report
from tools.answer_quality.figures import DenseAnswers
from tools.answer_quality.needles import haystack, padded, share_found
from tools.answer_quality.peers import PeerUnavailable, peer_rows
from tools.answer_quality.results import Results, code_digest
from tools.answer_quality.rows import TQSTORE, Row, own_rows
from tools.answer_quality.texts import Text, texts
from tools.benchmarks.machine import description

Reporter = Callable[[str, int, int], None]
DENSE = "dense"
NEEDLE_ROWS = ("QuantizedKVCache 4 bits", "TurboQuant 4/4")
LENGTHS = (512, 1024, 2048)
CHOICE_TEXTS = 1


@contextmanager
def shown_progress() -> Iterator[Reporter]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=None)
        yield lambda what, done, total: bars.update(
            task, description=what, completed=done, total=total
        )


class Measurement:
    """The model, the figures so far, and where progress is shown."""

    def __init__(self, results: Results, progress: Reporter) -> None:
        self.model, self.tokenizer = real_model.load()
        self.results, self.progress = results, progress
        self.code = code_digest()

    def version_of(self, row: Row, text: str) -> str:
        """Other packages' figures do not depend on our code."""
        return f"{text} {self.code}" if row.package == TQSTORE else text

    def measure_text(self, text: Text, rows: Sequence[Row]) -> None:
        missing = [
            row
            for row in rows
            if self.results.get(row.name, text.name, self.version_of(row, text.digest)) is None
        ]
        if not missing and self.results.get(DENSE, text.name, text.digest):
            return
        self.progress(f"{text.name}: dense", 0, len(missing))
        hidden = forward.hidden_states(self.model, text.tokens, None)
        answers = DenseAnswers(self.model, hidden, text.tokens)
        if self.results.get(DENSE, text.name, text.digest) is None:
            figures = asdict(answers.compared_with(hidden)) | {"version": text.digest}
            self.results.put(DENSE, {"package": "", "note": ""}, text.name, figures)
        for done, row in enumerate(missing):
            self.progress(f"{text.name}: {row.name}", done, len(missing))
            figures = self._attempt(row, text.tokens, lambda h: asdict(answers.compared_with(h)))
            self._keep(row, text.name, figures, text.digest)

    def measure_choices(self, text: Text) -> None:
        version = f"{text.digest} {self.code}"
        if self.results.choices.get(text.name, {}).get("version") != version:
            policies = choices.measured(self.model, text.tokens, self.progress)
            self.results.put_choices(text.name, version, policies)

    def measure_needles(self, num_tokens: int, rows: Sequence[Row]) -> None:
        stack = haystack(self.tokenizer, num_tokens)
        tokens = padded(stack, forward.STEP)
        what, version = f"needles {num_tokens}", Text(str(num_tokens), tokens).digest
        for done, row in enumerate(rows):
            if self.results.get(row.name, what, self.version_of(row, version)) is None:
                self.progress(f"{what}: {row.name}", done, len(rows))
                figures = self._attempt(
                    row, tokens, lambda h: {"found": share_found(self.model, h, stack)}
                )
                self._keep(row, what, figures, version)

    def _attempt(
        self, row: Row, tokens: Sequence[int], judge: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """What `judge` says of the hidden states, or why there are none."""
        try:
            return judge(row.run(self.model, tokens))
        except PeerUnavailable as error:
            return {"error": f"does not run here: {error}"}

    def _keep(self, row: Row, what: str, figures: dict[str, Any], version: str) -> None:
        bits = row.bits(self.model)
        described = {
            "package": row.package,
            "note": row.note,
            "key_bits": bits.keys,
            "value_bits": bits.values,
        }
        figures["version"] = self.version_of(row, version)
        self.results.put(row.name, described, what, figures)


def dense_row() -> Row:
    from tools.answer_quality.rows import Bits

    return Row(
        DENSE, "", lambda _: Bits(32, 32), lambda model, t: forward.hidden_states(model, t, None)
    )


def needle_rows(rows: Sequence[Row]) -> list[Row]:
    """The dense cache, the packing presets, and others' at 4 bits."""
    presets = [row for row in rows if row.note.startswith("preset") and "exact" not in row.name]
    return [dense_row(), *presets, *(row for row in rows if row.name in NEEDLE_ROWS)]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/quality", description=__doc__)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where figures are kept (default: in the user's cache folder)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only rows whose names contain one of these"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave other packages out")
    parser.add_argument("--no-needles", action="store_true", help="leave the haystacks out")
    parser.add_argument("--choices", action="store_true", help="compare choices of means, channels")
    parser.add_argument(
        "--tables", action="store_true", help="measure nothing: only tables of what is there"
    )
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    parser.add_argument(
        "--docs", action="store_true", help=f"put table and plot into docs/{report.DOCUMENT.name}"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console = Console(highlight=False)
    path = options.json or real_model.cache_folder() / "quality.json"
    with shown_progress() as progress:
        rows = [*own_rows(), *([] if options.no_peers else peer_rows(progress))]
        if options.list:
            console.print(*(f"{row.package}: {row.name}  {row.note}" for row in rows), sep="\n")
            return 0
        if not options.tables:
            path.parent.mkdir(parents=True, exist_ok=True)
            measure(options, path, rows, progress)
    results = Results(path)
    if DENSE not in results.rows:
        console.print(f"nothing was measured yet: {path} has no figures")
        return 1
    markdown = document(results)
    console.print(*markdown, sep="\n", markup=False, soft_wrap=True)
    if results.choices:
        table = report.choices_table(results.choices)
        console.print(*table, sep="\n", markup=False, soft_wrap=True)
    if options.docs:
        report.write_document(markdown)
        report.write_plot(results.rows)
        if results.choices:
            report.write_document(table, report.CHOICES_DOCUMENT)
    return 0


def measure(
    options: argparse.Namespace, path: Path, rows: Sequence[Row], progress: Reporter
) -> None:
    """Adds to the figures in `path` what the options ask for and is not there yet."""
    results = Results(path)
    results.machine = description(path.parent)
    measurement = Measurement(results, progress)
    wanted: list[str] = options.only or [""]
    chosen = [row for row in rows if any(part in row.name for part in wanted)]
    for text in texts(measurement.tokenizer):
        measurement.measure_text(text, chosen)
    if not options.no_needles:
        for length in LENGTHS:
            measurement.measure_needles(length, needle_rows(chosen))
    if options.choices:
        for text in texts(measurement.tokenizer)[:CHOICE_TEXTS]:
            measurement.measure_choices(text)
    if not options.only and not options.no_peers:
        results.keep_only([DENSE, *(row.name for row in rows)])


def document(results: Results) -> list[str]:
    """Machine, table of answers, table of needles."""
    dense = {
        text: results.rows[DENSE].get(text, {}).get("perplexity", float("nan"))
        for text in report.TEXTS
    }
    packed = {name: entry for name, entry in results.rows.items() if name != DENSE}
    lines = [f"{line}.  " for line in results.machine]
    lines += ["", *report.quality_table(packed, dense), "", *report.summary(packed)]
    needles = report.needle_table(results.rows, LENGTHS)
    return [*lines, "", "Share of seven needles found:", "", *needles] if needles[2:] else lines


if __name__ == "__main__":
    sys.exit(main())
