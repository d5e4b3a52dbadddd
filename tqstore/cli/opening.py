"""Opening the store a command is about, never making one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from tqstore.errors import NotFound
from tqstore.store.files import Files
from tqstore.store.folder import Folder
from tqstore.store.page_store import PageStore
from tqstore.store.root import open_root


@contextlib.contextmanager
def opened_store(
    ctx: typer.Context, path: str | None, files: Files | None = None
) -> Iterator[PageStore]:
    """The store of the command's or the global `--store`, or the default one, read-only.

    NotFound if there is none, with how to come by one.
    """
    try:
        store = PageStore.open(ctx.obj if path is None else path, mode="r", files=files)
    except NotFound as error:
        raise NotFound(
            error.problem,
            doing=error.doing,
            remedy="Saving a first session makes it; another store is named by --store PATH or "
            "TQSTORE_HOME",
        ) from error
    with store:
        yield store


@contextlib.contextmanager
def changed_store(
    ctx: typer.Context, path: str | None, files: Files | None = None
) -> Iterator[PageStore]:
    """As `opened_store`, for a command that writes."""
    with opened_store(ctx, path) as found:
        place = found.path
    with PageStore.open(place, mode="a", files=files) as store:
        yield store


@contextlib.contextmanager
def opened_root(store: PageStore) -> Iterator[Folder]:
    """The store's own folder, for what a PageStore has no method for."""
    root, _ = open_root(Files(), store.path, "r")
    with root:
        yield root
