"""A pack drawn for `inspect`: its header, its blocks and slots, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tqstore.cli.output import Cell, console, fields, print_json, table
from tqstore.cli.pack_contents import PackContents, find_pack, read_pack
from tqstore.cli.page_view import PagePlace, PageView, show_page
from tqstore.cli.printable import counted, ranges, size
from tqstore.errors import Corrupt, NotFound
from tqstore.format.block_hash import NAMESPACE_ID_NBYTES, BlockRecord
from tqstore.format.page import PageHeader

__all__ = ["find_pack", "show_pack", "show_pack_page"]

_SHOWN_TOKENS = 8
_REMEDY = "`tqstore verify` checks the whole store"
# Stands for the namespace id, which a pack does not hold: only whether a block is first is shown.
_UNKNOWN_NAMESPACE = bytes(NAMESPACE_ID_NBYTES)


def show_pack(path: Path, *, as_json: bool) -> None:
    """Shows what can be read, then raises Corrupt if anything is wrong."""
    pack = read_pack(path)
    if as_json:
        print_json(_pack_fields(pack))
    else:
        out = console()
        out.print(fields(_pack_cells(pack)))
        out.print()
        out.print(_block_table(pack))
        if pack.slot_faults:
            out.print()
            out.print(_fault_table(pack))
    _raise_faults(pack)


def show_pack_page(path: Path, slot: int, stream: str | None, *, as_json: bool) -> None:
    """One slot.  A damaged page is shown as it is, then Corrupt is raised."""
    pack = read_pack(path)
    if slot >= pack.header.num_pages:
        raise NotFound(
            f"{path.name} has no page {slot}",
            doing="inspecting a pack",
            remedy=f"Its pages are 0 to {pack.header.num_pages - 1}",
        )
    record, fault = pack.record(slot), pack.slot_fault(slot)
    block_index, layer = pack.header.page_refs[slot]
    block = _block(pack, block_index)
    try:
        header = PageHeader.decode(record, str(path), slot)
    except Corrupt:
        if fault is None:
            raise
        # Show what the pack's header says the page is; the fault below tells that it isn't.
        header = PageHeader(layer, pack.spec.page_tokens, block.hash, pack.spec.digest)
    place = PagePlace(str(path), slot)
    show_page(PageView(place, record, header, pack.spec, block, fault), stream, as_json=as_json)
    if fault is not None:
        raise Corrupt(str(path), fault, page=slot, doing="inspecting a page", remedy=_REMEDY)


def _block(pack: PackContents, index: int) -> BlockRecord:
    return pack.header.block(index, _UNKNOWN_NAMESPACE)


def _raise_faults(pack: PackContents) -> None:
    faults = list(pack.file_faults())
    bad = pack.slot_faults
    if bad:
        are = "is" if len(bad) == 1 else "are"
        faults.append(f"{len(bad)} of {counted(pack.header.num_pages, 'page')} {are} damaged")
    if faults:
        raise Corrupt(str(pack.path), "; ".join(faults), doing="inspecting a pack", remedy=_REMEDY)


def _pack_cells(pack: PackContents) -> dict[str, Cell]:
    header, layout, spec = pack.header, pack.layout, pack.spec
    layers = sorted({layer for _, layer in header.page_refs})
    good = header.num_pages - len(pack.slot_faults)
    faults = list(pack.file_faults())
    return {
        "pack": str(pack.path),
        "page spec": f"{spec.name} ({', '.join(f'{k} {v}' for k, v in spec.fields.items())})",
        "bytes": f"{len(pack.raw):,} ({size(len(pack.raw))}), "
        f"{pack.padding_nbytes:,} of them padding ({pack.padding_nbytes / len(pack.raw):.1%})",
        "header": f"{pack.header_nbytes:,} bytes, checksum good",
        "pages": f"{header.num_pages} of at most {layout.max_pages}, {spec.page_nbytes:,} bytes "
        f"each, one every {layout.stride:,}",
        "layers": ranges(layers),
        "blocks": str(header.num_blocks),
        "checksums": Text(
            f"{good} of {header.num_pages} pages good",
            "green" if good == header.num_pages else "red",
        ),
        "file": Text("; ".join(faults), "red") if faults else Text("as its header says", "green"),
    }


def _block_table(pack: PackContents) -> Table:
    made = table("BLOCK", "HASH", "PARENT", "LAYERS", "SLOTS", "TOKENS", right=("BLOCK",))
    refs = pack.header.page_refs
    for index in range(pack.header.num_blocks):
        block = _block(pack, index)
        slots = [slot for slot, (of, _) in enumerate(refs) if of == index]
        tokens = block.tokens.tolist()
        preview = " ".join(map(str, tokens[:_SHOWN_TOKENS]))
        made.add_row(
            str(index),
            block.hash.hex(),
            "first" if block.is_first else block.parent.hex()[:12],
            ranges(sorted(refs[slot][1] for slot in slots)),
            ranges(slots),
            preview + (" ..." if len(tokens) > _SHOWN_TOKENS else ""),
        )
    return made


def _fault_table(pack: PackContents) -> Table:
    made = table("SLOT", "LAYER", "BLOCK", "WHAT IS WRONG", right=("SLOT", "LAYER", "BLOCK"))
    for slot, fault in pack.slot_faults.items():
        block, layer = pack.header.page_refs[slot]
        made.add_row(str(slot), str(layer), str(block), Text(fault, "red"))
    return made


def _pack_fields(pack: PackContents) -> dict[str, Any]:
    blocks = [_block(pack, index) for index in range(pack.header.num_blocks)]
    return {
        "pack": str(pack.path),
        "page_spec": pack.spec.fields,
        "nbytes": len(pack.raw),
        "header_nbytes": pack.header_nbytes,
        "padding_nbytes": pack.padding_nbytes,
        "first_slot": pack.first_slot,
        "stride": pack.layout.stride,
        "page_nbytes": pack.spec.page_nbytes,
        "max_pages": pack.layout.max_pages,
        "faults": list(pack.file_faults()),
        "blocks": [
            {
                "hash": block.hash,
                "parent": None if block.is_first else block.parent,
                "tokens": block.tokens.tolist(),
            }
            for block in blocks
        ],
        "pages": [
            {"slot": slot, "block": block, "layer": layer, "fault": pack.slot_faults.get(slot)}
            for slot, (block, layer) in enumerate(pack.header.page_refs)
        ],
    }
