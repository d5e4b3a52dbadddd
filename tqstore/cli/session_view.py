"""A session drawn for `inspect`: checkpoints, namespace, layers, states, metadata, packs, pages."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from tqstore.cli.output import Cell, Output, console, fields, fitted, print_json, table
from tqstore.cli.page_view import PagePlace, PageView, show_page
from tqstore.cli.paging_view import memory_line
from tqstore.cli.printable import age, counted, json_text, moment, printable, ranges, size
from tqstore.cli.session_contents import (
    LayerGroup,
    SessionContents,
    pack_path,
    read_session,
    require_layers,
)
from tqstore.errors import NotFound
from tqstore.format.checkpoint import Checkpoint, ModelState
from tqstore.format.page import PageHeader
from tqstore.store.page_store import PageStore

_SHOWN_PACKS = 12


def show_session(store: PageStore, name: str, *, as_json: bool) -> None:
    """Raises NotFound, after showing everything else, if pages are missing."""
    session = read_session(store, name)
    if as_json:
        print_json(_session_fields(session))
    else:
        _draw(session, console())
    if session.num_missing:
        raise NotFound(
            f"{counted(session.num_missing, 'page')} that session {name!r} needs "
            f"{'is' if session.num_missing == 1 else 'are'} not in the store",
            doing="inspecting a session",
            remedy="It resumes from a shorter prefix; `tqstore verify` tells what is damaged",
        )


def show_session_page(
    store: PageStore, name: str, block_idx: int, layer: int, stream: str | None, *, as_json: bool
) -> None:
    """The page of one layer and block; NotFound if there is none, Corrupt if it is damaged."""
    checkpoint = store.latest(name)
    namespace = store.stored_namespace(checkpoint.namespace_id)
    require_layers(name, checkpoint, namespace)
    _require_page(name, checkpoint, block_idx, layer)
    ns, spec = store.namespace(namespace), namespace.layers[layer]
    block_hash = checkpoint.block_hashes[block_idx]
    location, block = ns.locate(spec, layer, block_hash), ns.block(block_hash)
    if location is None or block is None:
        raise NotFound(
            f"the page of layer {layer}, block {block_idx} is not in the store",
            doing=f"inspecting session {name!r}",
            remedy="It may have left the layer's window; `tqstore verify` tells if it is needed",
        )
    records = np.zeros((1, spec.page_nbytes), np.uint8)
    ns.read_pages(spec, [location], records)
    path = pack_path(ns, spec, location)
    header = PageHeader.decode(records[0], path, location.slot)
    place = PagePlace(
        path, location.slot, name, block_idx, len(checkpoint.block_hashes), len(namespace.layers)
    )
    view = PageView(place, records[0], header, spec, block)
    show_page(view, stream, as_json=as_json)


def _require_page(name: str, checkpoint: Checkpoint, block_idx: int, layer: int) -> None:
    num_blocks, num_layers = len(checkpoint.block_hashes), len(checkpoint.layers)
    sealed = num_blocks * checkpoint.page_tokens
    doing = f"inspecting session {name!r}"
    if block_idx >= num_blocks:
        raise NotFound(
            f"there is no page {block_idx}",
            doing=doing,
            remedy=f"Its pages are 0 to {num_blocks - 1}; tokens from {sealed} on are in the tail"
            if num_blocks
            else f"It has no pages yet: all {checkpoint.num_tokens} tokens are in the tail",
        )
    if layer >= num_layers:
        raise NotFound(
            f"there is no layer {layer}", doing=doing, remedy=f"Layers are 0 to {num_layers - 1}"
        )


def _draw(session: SessionContents, out: Output) -> None:
    out.print(fields(_summary_cells(session)))
    out.print()
    out.print(_checkpoint_table(session))
    out.print()
    out.print(fitted(out, _layer_table(session), ("DTYPE", "PAGE BYTES", "HEADS", "DIMS")))
    if session.checkpoint.states:
        out.print()
        out.print(_state_table(session.checkpoint.states))
    if session.packs:
        out.print()
        out.print(_pack_table(session.packs))
    if session.checkpoint.metadata:
        out.print()
        out.print(Text("Metadata", "bold"))
        for line in json_text(session.checkpoint.metadata).splitlines():
            out.print(printable(line))


def _summary_cells(session: SessionContents) -> dict[str, Cell]:
    checkpoint, namespace = session.checkpoint, session.namespace
    cells: dict[str, Cell] = {
        "session": session.name,
        "tokens": f"{checkpoint.num_tokens:,}: {counted(len(checkpoint.block_hashes), 'block')} of "
        f"{checkpoint.page_tokens} and {len(checkpoint.tail_tokens) // 8} in the tail",
        "saved": f"{moment(checkpoint.created_ns)}, {age(checkpoint.created_ns)} ago",
        "kept": f"until {moment(checkpoint.expires_ns)}"
        if checkpoint.expires_ns
        else "until it is removed",
        "namespace": namespace.id.hex(),
        "model": namespace.fingerprint,
        **{f"model.{part}": text for part, text in namespace.parts},
        "recent": f"the newest {checkpoint.recent_tokens} tokens stay exact",
        "history": "pages that leave a layer's window are kept"
        if checkpoint.window_history
        else "pages that leave a layer's window are dropped",
        "memory": f"when it was saved: {memory_line(checkpoint.paging)}",
        "seed": str(namespace.seed),
        "tenant": namespace.tenant or "none",
    }
    if session.num_missing:
        cells["missing"] = Text(counted(session.num_missing, "page"), "red")
    return cells


def _checkpoint_table(session: SessionContents) -> Table:
    made = table("CHECKPOINT", "TOKENS", "BYTES", "AGE", "", right=("TOKENS", "BYTES", "AGE"))
    for kept in session.kept:
        if kept.problem is not None:
            made.add_row(kept.file, "", "", "", Text(printable(kept.problem), "red"))
            continue
        made.add_row(kept.file, f"{kept.num_tokens:,}", size(kept.nbytes), age(kept.created_ns), "")
    return made


def _layer_table(session: SessionContents) -> Table:
    made = table(
        "LAYERS", "KEYS", "VALUES", "HEADS", "DIMS", "DTYPE", "WINDOW", "PAGES",
        "MISSING", "PAGE BYTES", "TAIL",
        right=("HEADS", "DIMS", "WINDOW", "PAGES", "MISSING", "PAGE BYTES", "TAIL"),
    )  # fmt: skip
    num_tokens = session.checkpoint.num_tokens
    for group in session.groups:
        spec = group.spec
        tail = f"{counted(num_tokens - group.tail_start, 'token')}, {size(group.tail_nbytes)}"
        made.add_row(
            ranges(group.layers),
            str(spec.keys),
            str(spec.values),
            str(spec.kv_heads),
            f"{spec.key_dim}/{spec.value_dim}",
            spec.dtype,
            _window(group),
            f"{group.num_needed:,}",
            Text(f"{group.num_missing:,}", "red") if group.num_missing else "-",
            f"{spec.page_nbytes:,}",
            tail,
        )
    return made


def _window(group: LayerGroup) -> str:
    if group.window is None:
        return "all"
    return f"{group.window:,}" + (f", {group.sink_tokens} sinks" if group.sink_tokens else "")


def _state_table(states: tuple[ModelState, ...]) -> Table:
    made = table("STATE OF LAYER", "CLASS", "ARRAYS", "BYTES", right=("STATE OF LAYER", "BYTES"))
    for state in states:
        arrays = ", ".join(f"{a.dtype} {'x'.join(map(str, a.shape))}" for a in state.arrays)
        nbytes = sum(array.nbytes for array in state.arrays)
        made.add_row(str(state.layer), printable(state.class_name), arrays, size(nbytes))
    return made


def _pack_table(packs: dict[str, int]) -> Table:
    made = table("PACK", "PAGES USED", right=("PAGES USED",))
    for path, num_pages in list(packs.items())[:_SHOWN_PACKS]:
        made.add_row(path, f"{num_pages:,}")
    if len(packs) > _SHOWN_PACKS:
        made.add_row(f"and {len(packs) - _SHOWN_PACKS} more; --json lists all", "")
    return made


def _session_fields(session: SessionContents) -> dict[str, Any]:
    checkpoint = session.checkpoint
    return {
        "session": session.name,
        "tokens": checkpoint.num_tokens,
        "blocks": len(checkpoint.block_hashes),
        "page_tokens": checkpoint.page_tokens,
        "recent_tokens": checkpoint.recent_tokens,
        "window_history": checkpoint.window_history,
        "tail_tokens": len(checkpoint.tail_tokens) // 8,
        "created_ns": checkpoint.created_ns,
        "expires_ns": checkpoint.expires_ns,
        "block_hashes": checkpoint.block_hashes,
        "checkpoints": [vars(kept) for kept in session.kept],
        "namespace": {"id": session.namespace.id, **session.namespace.fields},
        "layers": [group.fields for group in session.groups],
        "states": [_state_fields(state) for state in checkpoint.states],
        "metadata": checkpoint.metadata,
        "paging": checkpoint.paging,
        "packs": [{"path": path, "pages_used": count} for path, count in session.packs.items()],
    }


def _state_fields(state: ModelState) -> dict[str, Any]:
    return {
        "layer": state.layer,
        "class": state.class_name,
        "arrays": [{"dtype": a.dtype, "shape": a.shape, "nbytes": a.nbytes} for a in state.arrays],
        "meta": state.meta,
    }
