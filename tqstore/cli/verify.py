"""`tqstore verify`: everything that is wrong with a store, with exit code 1 if anything is."""

from __future__ import annotations

import typer

from tqstore.cli.options import JsonOption, StoreOption

FINDINGS_EXIT = 1


def verify(ctx: typer.Context, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Check every byte of a store: checksums, hash chains, references, leftovers, access.

    Exit code 0 if all is well, 1 if there are findings.  Nothing is changed.
    """
    from tqstore.cli.counted_files import CountedFiles
    from tqstore.cli.finding_view import collect, show_findings
    from tqstore.cli.opening import opened_store

    files = CountedFiles()
    with opened_store(ctx, store, files) as opened:
        findings = collect(opened, files)
        show_findings(opened, findings, files.nbytes_read, as_json=as_json)
    if findings:
        raise typer.Exit(FINDINGS_EXIT)
