"""What an import or an export of a prompt-cache file did, as text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from tqstore.cli.output import console, fields, print_json
from tqstore.cli.printable import counted, printable, size
from tqstore.mlx_lm.prompt_export import ExportReport
from tqstore.mlx_lm.prompt_import import ImportReport


def show_import(report: ImportReport, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
        return
    out = console()
    out.print(
        fields(
            {
                "session": report.session,
                "saved by": report.layout,
                "tokens": f"{report.num_tokens:,}",
                "layers": _layers(report.num_layers, report.codecs, report.own_states),
                "written": f"{counted(report.new_pages, 'page')}, {size(report.nbytes_written)}",
            }
        )
    )
    for loss in report.losses:
        out.print(printable(loss))


def show_export(report: ExportReport, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
        return
    out = console()
    out.print(
        fields(
            {
                "file": report.path,
                "session": report.session,
                "tokens": f"{report.num_tokens:,}",
                "layers": _layers(report.num_layers, report.codecs, report.own_states),
                "bytes": size(report.nbytes),
            }
        )
    )
    if report.left_out:
        out.print(f"not in the file: metadata {printable(', '.join(report.left_out))}")


def _layers(num_layers: int, codecs: Sequence[tuple[str, str]], own_states: Sequence[str]) -> str:
    """`18 paged (prod4/int8), 2 ArraysCache`."""
    kinds = ", ".join(f"{keys}/{values}" for keys, values in dict.fromkeys(codecs))
    own = [f"{count} {name}" for name, count in Counter(own_states).items()]
    return ", ".join([f"{num_layers} paged ({kinds})", *own])
