"""A store's catalog drawn for `ls`: a table of sessions or packs, or JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from tqstore.cli.catalog import (
    Catalog,
    ListedPack,
    ListedSession,
    codecs_of,
    read_catalog,
    read_packs,
)
from tqstore.cli.output import Output, console, fitted, print_json, table
from tqstore.cli.printable import age, counted, printable, size
from tqstore.store.page_store import PageStore

SHORT_ID = 12  # hex digits that tell fingerprints and namespaces apart for people


def show_sessions(store: PageStore, *, as_json: bool) -> None:
    catalog = read_catalog(store)
    if as_json:
        print_json(_catalog_fields(store, catalog))
        return
    out = console()
    if not catalog.sessions:
        out.print(_how_to_begin(store, catalog))
        return
    out.print(fitted(out, _session_table(catalog), ("NAMESPACE", "BLOCKS", "MODEL")))
    _show_problems(out, {s.info.name: s.info.problem for s in catalog.sessions})
    num_packs = sum(info.num_packs for info in catalog.namespaces)
    out.print(
        f"\n{counted(len(catalog.sessions), 'session')}, "
        f"{counted(len(catalog.namespaces), 'namespace')}, {counted(num_packs, 'pack')}, "
        f"{size(catalog.nbytes)} in {printable(str(store.path))}"
    )


def show_packs(store: PageStore, *, as_json: bool) -> None:
    found = list(read_packs(store))
    if as_json:
        print_json({"store": str(store.path), "packs": [_pack_fields(pack) for pack in found]})
        return
    out = console()
    if found:
        out.print(_pack_table(found))
    _show_problems(out, {pack.path: pack.problem for pack in found})
    nbytes = size(sum(pack.nbytes for pack in found))
    out.print(f"\n{counted(len(found), 'pack')}, {nbytes} in {printable(str(store.path))}")


def _session_table(catalog: Catalog) -> Table:
    numbers = ("TOKENS", "BLOCKS", "OWN", "SHARED", "AGE")
    made = table(
        "SESSION", "TOKENS", "BLOCKS", "OWN", "SHARED", "CODECS", "MODEL", "NAMESPACE", "AGE",
        right=numbers,
    )  # fmt: skip
    for session in catalog.sessions:
        info, namespace = session.info, session.namespace
        if info.problem is not None:
            made.add_row(Text(info.name, "red"), *[""] * 4, Text("damaged", "red"))
            continue
        made.add_row(
            info.name,
            f"{info.num_tokens:,}",
            f"{info.num_blocks:,}",
            size(session.own_nbytes),
            size(session.shared_nbytes) if session.shared_nbytes else "-",
            codecs_of(namespace.layers) if namespace else Text("namespace unreadable", "red"),
            namespace.fingerprint[:SHORT_ID] if namespace else "?",
            info.namespace_id.hex()[:SHORT_ID],
            age(info.created_ns),
        )
    return made


def _pack_table(packs: list[ListedPack]) -> Table:
    made = table("PACK", "PAGES", "BYTES", "AGE", "CODECS", right=("PAGES", "BYTES", "AGE"))
    for pack in packs:
        if pack.problem is not None:
            made.add_row(Text(pack.path, "red"), *[""] * 3, Text("damaged", "red"))
            continue
        made.add_row(
            pack.path,
            f"{pack.num_pages:,}",
            size(pack.nbytes),
            age(pack.created_ns),
            f"{pack.spec.keys}/{pack.spec.values}",
        )
    return made


def _show_problems(out: Output, problems: dict[str, str | None]) -> None:
    for name, problem in problems.items():
        if problem is not None:
            out.print(Text(f"\n{name}: {printable(problem)}", "red"))


def _how_to_begin(store: PageStore, catalog: Catalog) -> str:
    return (
        f"No sessions in {printable(str(store.path))} ({size(catalog.nbytes)}).\n\n"
        "A first one, in Python:\n"
        "    store = tqstore.Store.open()  # or a path\n"
        '    with tqstore.mlx_lm.session(store, model, "my-chat") as chat:\n'
        "        rest = chat.feed(tokenizer.encode(prompt))"
    )


def _catalog_fields(store: PageStore, catalog: Catalog) -> dict[str, Any]:
    return {
        "store": str(store.path),
        "uuid": store.uuid,
        "nbytes": catalog.nbytes,
        "sessions": [_session_fields(session) for session in catalog.sessions],
        "namespaces": [
            {
                "id": info.id,
                "packs": info.num_packs,
                "nbytes": info.nbytes,
                "problem": info.problem,
            }
            for info in catalog.namespaces
        ],
    }


def _session_fields(session: ListedSession) -> dict[str, Any]:
    info, namespace = session.info, session.namespace
    return {
        "name": info.name,
        "sequence": info.sequence,
        "tokens": info.num_tokens,
        "blocks": info.num_blocks,
        "own_nbytes": session.own_nbytes,
        "shared_nbytes": session.shared_nbytes,
        "checkpoint_nbytes": info.nbytes,
        "codecs": [[str(s.keys), str(s.values)] for s in namespace.layers] if namespace else None,
        "model": namespace.fingerprint if namespace else None,
        "namespace": info.namespace_id,
        "created_ns": info.created_ns,
        "expires_ns": info.expires_ns,
        "metadata": info.metadata,
        "problem": info.problem,
    }


def _pack_fields(pack: ListedPack) -> dict[str, Any]:
    return {
        "path": pack.path,
        "namespace": pack.namespace_id,
        "page_spec": pack.spec.fields,
        "pages": pack.num_pages,
        "nbytes": pack.nbytes,
        "created_ns": pack.created_ns,
        "problem": pack.problem,
    }
