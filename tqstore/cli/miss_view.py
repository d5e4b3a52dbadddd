"""Misses found for `why-miss`, and drawn."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tqstore.cli.catalog_view import SHORT_ID
from tqstore.cli.output import console, print_json, table
from tqstore.cli.printable import printable
from tqstore.cli.which import find_namespace
from tqstore.errors import BackendFailed, InvalidInput, NotFound, TqStoreError
from tqstore.format.block_hash import chain_blocks
from tqstore.store import sessions
from tqstore.store.misses import Miss, explain
from tqstore.store.names import session_folder
from tqstore.store.page_store import PageStore

_MAX_FILE_NBYTES = 1 << 28
_READING = "reading tokens"
Misses = dict[bytes, Miss]  # by namespace


def explain_session(store: PageStore, name: str) -> Misses:
    """Of the session's newest checkpoint; NotFound (which tells if it has expired), Corrupt."""
    checkpoint = store.latest(name)
    ns = store.namespace(store.stored_namespace(checkpoint.namespace_id))
    windows = [layer.window for layer in checkpoint.layers]
    sinks = [layer.sink_tokens for layer in checkpoint.layers]
    if not checkpoint.block_hashes:
        return {ns.id: Miss("hit", "", 0, 0)}
    return {ns.id: explain(ns, windows, sinks, checkpoint.block_hashes)}


def explain_tokens(store: PageStore, file: Path, prefix: str | None) -> Misses:
    """Of a prompt, in each namespace or in the one that begins with `prefix`."""
    tokens = read_tokens(file)
    ids = store.namespace_ids() if prefix is None else [find_namespace(store, prefix)]
    misses: Misses = {}
    for namespace_id in ids:
        try:
            namespace = store.stored_namespace(namespace_id)
        except TqStoreError as error:
            misses[namespace_id] = Miss("corrupt", str(error), 0, 0)
            continue
        ns = store.namespace(namespace)
        windows, sinks = _reach(store, namespace_id, len(namespace.layers))
        blocks = chain_blocks(ns.id, tokens, namespace.page_tokens)
        hashes = [block.hash for block in blocks]
        first = blocks[0] if blocks and prefix is not None else None
        misses[namespace_id] = explain(ns, windows, sinks, hashes, first)
    if not misses:
        raise NotFound("the store has no namespace yet", doing="looking for tokens")
    return misses


def read_tokens(file: Path) -> list[int]:
    """Integers of a JSON list or separated by white space; InvalidInput for anything else.

    NotFound for no file, BackendFailed for one that may not be read.
    """
    try:
        text = _text_of(file)
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
        if not all(isinstance(token, str) or type(token) is int for token in found):
            raise ValueError("not integers")
        return [int(token) for token in found]
    except InvalidInput:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{file} does not hold token ids",
            doing=_READING,
            remedy="Give a JSON list of integers, or integers separated by white space",
        ) from error


def _text_of(file: Path) -> str:
    try:
        if file.is_dir():
            raise InvalidInput(f"{file} is a folder", doing=_READING, remedy="Give a file")
        if file.stat().st_size > _MAX_FILE_NBYTES:
            raise InvalidInput(f"{file} is too large for a list of tokens", doing=_READING)
        return file.read_text()
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {file}", doing=_READING) from error
    except OSError as error:
        raise BackendFailed(f"{file}: {error.strerror or error}", doing=_READING) from error


def _said(miss: Miss, *, of_session: bool) -> str:
    if miss.kind == "hit":
        return "all is there"
    if of_session and miss.kind == "no such prefix":  # it was there once, or was never whole
        return "pages are missing, and where they went is not noted"
    return str(miss)


def show_misses(
    store: PageStore, misses: Misses, *, of_session: bool = False, as_json: bool
) -> None:
    if as_json:
        told = [{"namespace": ns.hex(), **asdict(miss)} for ns, miss in misses.items()]
        print_json({"store": str(store.path), "misses": told})
        return
    made = table("NAMESPACE", "BLOCKS", "OF", "WHY NOT MORE", right=("BLOCKS", "OF"))
    for namespace_id, miss in misses.items():
        made.add_row(
            namespace_id.hex()[:SHORT_ID],
            str(miss.num_blocks),
            str(miss.asked_blocks),
            printable(_said(miss, of_session=of_session)),
        )
    console().print(made)


def _reach(
    store: PageStore, namespace_id: bytes, num_layers: int
) -> tuple[list[int | None], list[int]]:
    """Windows and sinks as its newest session has them; without one every layer sees all."""
    for info in store.sessions():
        if info.namespace_id == namespace_id:
            for summary in sessions.summaries(store.root, session_folder(info.name)):
                if len(summary.reach) == num_layers:
                    return [reach[0] for reach in summary.reach], [r[1] for r in summary.reach]
    return [None] * num_layers, [0] * num_layers
