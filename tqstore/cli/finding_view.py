"""What `verify` found, gathered with a progress bar and drawn as a table or JSON."""

from __future__ import annotations

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from tqstore.cli.counted_files import CountedFiles
from tqstore.cli.opening import opened_root
from tqstore.cli.output import console, print_json, table
from tqstore.cli.printable import counted, printable, size
from tqstore.store.page_store import PageStore
from tqstore.store.repair import Repair
from tqstore.store.usage import folder_nbytes
from tqstore.store.verify import Finding

_STYLES = {"error": "red", "warning": "yellow"}


def collect(store: PageStore, files: CountedFiles) -> list[Finding]:
    """All findings, errors first; the bar, on a terminal, moves with the bytes read."""
    err = console(is_stderr=True)
    with opened_root(store) as root:
        total = folder_nbytes(root)
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=total)
        files.on_read = lambda nbytes: bar.advance(task, nbytes)
        findings = list(store.verify())
        files.on_read = None
    return sorted(findings, key=lambda finding: finding.severity)


def show_findings(
    store: PageStore,
    findings: list[Finding],
    nbytes_read: int,
    repairs: list[Repair] | None = None,
    *,
    as_json: bool,
) -> None:
    """`repairs` is what was done before they were looked for, None if nothing was to be."""
    if as_json:
        print_json(
            {
                "store": str(store.path),
                "nbytes_read": nbytes_read,
                "findings": [vars(finding) for finding in findings],
                "repairs": None if repairs is None else [vars(fix) for fix in repairs],
            }
        )
        return
    out = console()
    for fix in repairs or []:
        out.print(f"{printable(fix.path)}: {printable(fix.what)}")
    if findings:
        made = table("SEVERITY", "KIND", "WHERE", "WHAT")
        for finding in findings:
            severity = Text(finding.severity, _STYLES[finding.severity])
            made.add_row(severity, finding.kind, printable(finding.path), printable(finding.what))
        out.print(made)
        out.print()
    num_errors = sum(finding.severity == "error" for finding in findings)
    out.print(
        f"{counted(num_errors, 'error')}, {counted(len(findings) - num_errors, 'warning')}; "
        f"read {size(nbytes_read)} of {printable(str(store.path))}"
    )
