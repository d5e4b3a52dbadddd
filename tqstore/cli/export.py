"""`tqstore export`: a session becomes a prompt-cache file of mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption


def export(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's name.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to make, ending in .safetensors.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FINGERPRINT|PATH",
            help="Only of this model.  Its folder is needed for a session with states of layers "
            "that are not paged.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace FILE if it is there, once the new one is whole."),
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a session, decoded, to a file that the installed mlx-lm's load_prompt_cache reads."""
    from tqstore.cli.requirements import require

    require("mlx_lm", "mlx-lm")
    from tqstore.cli.model_argument import model_of
    from tqstore.cli.opening import opened_store
    from tqstore.cli.prompt_file_view import show_export
    from tqstore.errors import InvalidInput
    from tqstore.mlx_lm.prompt_export import export_prompt_file
    from tqstore.session import Store

    if file.is_dir():
        raise InvalidInput(
            f"{file} is a folder",
            doing="exporting",
            remedy=f"Name the file to make in it, such as {file / 'session.safetensors'}",
        )
    loaded, fingerprint = model_of(model)
    with opened_store(ctx, store) as opened:
        report = export_prompt_file(
            Store(opened),
            session,
            file,
            model=loaded,
            fingerprint=fingerprint,
            overwrite=force,
        )
        show_export(report, as_json=as_json)
