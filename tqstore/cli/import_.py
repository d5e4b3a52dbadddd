"""`tqstore import`: a prompt-cache file of mlx-lm becomes a session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqstore.cli.options import JsonOption, StoreOption
from tqstore.presets import DEFAULT_PRESET


def import_(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .safetensors file of mlx-lm 0.28 or newer.")
    ],
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The new session's name.")],
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens",
            metavar="TOKENS",
            help="A file of the token ids that were cached: JSON, or separated by spaces "
            "[those in the file's metadata].",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FINGERPRINT|PATH",
            help="The model's folder, or its fingerprint [that in the file's metadata].",
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Both codecs at once: card, small, balanced, near-lossless or exact.",
        ),
    ] = DEFAULT_PRESET,
    keys: Annotated[
        str | None, typer.Option("--keys", metavar="CODEC", help="Codec of the keys.")
    ] = None,
    values: Annotated[
        str | None, typer.Option("--values", metavar="CODEC", help="Codec of the values.")
    ] = None,
    page_tokens: Annotated[
        int, typer.Option("--page-tokens", metavar="N", help="Tokens a page holds.")
    ] = 64,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a session of a prompt-cache file that mlx-lm has saved.

    The settings have to be those that the session will be opened with; the ones not given are the
    defaults of `tqstore.mlx_lm.session`.  A store is made if there is none.
    """
    from tqstore.cli.requirements import require

    require("mlx_lm", "mlx-lm")
    from tqstore.cli.miss_view import read_tokens
    from tqstore.cli.model_argument import model_of
    from tqstore.cli.prompt_file_view import show_import
    from tqstore.mlx_lm.prompt_import import import_prompt_file
    from tqstore.session import Store

    told = None if tokens is None else read_tokens(tokens)
    loaded, fingerprint = model_of(model)
    with Store.open(ctx.obj if store is None else store) as opened:
        report = import_prompt_file(
            opened,
            session,
            file,
            fingerprint=fingerprint,
            tokens=told,
            model=loaded,
            preset=preset,
            keys=keys,
            values=values,
            page_tokens=page_tokens,
        )
        show_import(report, as_json=as_json)
