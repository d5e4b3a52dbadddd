"""`--model`: a folder to load a model from, or the fingerprint of one."""

from __future__ import annotations

import re
from pathlib import Path

import typer
from mlx.nn.layers.base import Module

from tqstore.errors import InvalidInput
from tqstore.mlx_lm.remembered import remembered_fingerprint

_FINGERPRINT = re.compile(r"[0-9a-f]{16,128}")


def model_of(argument: str | None) -> tuple[Module | None, str | None]:
    """The model, loaded if the argument is a folder, and its fingerprint.

    A folder goes before a fingerprint of the same name.  BadParameter for what is neither.
    """
    if argument is None:
        return None, None
    folder = Path(argument)
    if not folder.is_dir():
        if _FINGERPRINT.fullmatch(argument):
            return None, argument
        raise typer.BadParameter(f"--model: {argument!r} is neither a folder nor a fingerprint")
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"no model can be loaded from {folder}: {error}",
            doing="loading the model",
            remedy="Give the folder of an mlx-lm model, or its fingerprint",
        ) from error
    return model, remembered_fingerprint(model, folder)
