"""`tqstore verify`: everything that is wrong with a store, with exit code 1 if anything is."""

from __future__ import annotations

from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption

FINDINGS_EXIT = 1


def verify(
    ctx: typer.Context,
    is_repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Mend what can be mended, set aside what can't, then check what is left.",
        ),
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of a store: checksums, hash chains, references, leftovers, access.

    Exit code 0 if all is well, 1 if there are findings.  Without --repair nothing is changed.
    """
    from tqstore.cli.counted_files import CountedFiles
    from tqstore.cli.finding_view import collect, show_findings
    from tqstore.cli.opening import changed_store, opened_store

    files = CountedFiles()
    open_it = changed_store if is_repair else opened_store
    with open_it(ctx, store, files) as opened:
        repairs = opened.repair() if is_repair else None
        files.nbytes_read = 0 if is_repair else files.nbytes_read
        findings = collect(opened, files)
        show_findings(opened, findings, files.nbytes_read, repairs, as_json=as_json)
    if findings:
        raise typer.Exit(FINDINGS_EXIT)
