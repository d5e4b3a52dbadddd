"""One page drawn for `inspect --page`: its header, its block's tokens, its streams' statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from tqstore.cli.bars import histogram_table, small_bars
from tqstore.cli.output import Cell, Output, console, fields, fits, is_unicode, print_json, table
from tqstore.cli.printable import number, size
from tqstore.cli.stream_stats import NUM_BINS, StreamStats, page_stats, rebinned
from tqstore.errors import NotFound
from tqstore.format.block_hash import BlockRecord
from tqstore.format.page import NO_CHOICE, PageHeader, Records
from tqstore.spec import PageSpec

_LAYOUT = ("DTYPE", "SHAPE", "OFFSET", "BYTES")
_CONTENT = ("ZEROS", "ENTROPY")
_SHAPE = ("MIN", "MAX", "MEAN", "STD", "DISTRIBUTION")


@dataclass(frozen=True)
class PagePlace:
    """Where a page is, and of which session if it was asked for by one: page of how many."""

    pack: str
    slot: int
    session: str | None = None
    page: int = 0
    num_pages: int = 0
    num_layers: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        if self.session is None:
            return {"pack": self.pack, "slot": self.slot}
        return vars(self)

    def cells(self, layer: int) -> dict[str, Cell]:
        if self.session is None:
            return {"pack": self.pack, "slot": str(self.slot), "layer": str(layer)}
        return {
            "session": self.session,
            "page": f"{self.page} of 0-{self.num_pages - 1}",
            "layer": f"{layer} of 0-{self.num_layers - 1}",
            "pack": self.pack,
            "slot": str(self.slot),
        }


@dataclass(frozen=True)
class PageView:
    """A page as it was found; `fault` says what is wrong with its bytes, None if nothing is."""

    place: PagePlace
    record: Records
    header: PageHeader
    spec: PageSpec
    block: BlockRecord
    fault: str | None = None


def show_page(view: PageView, stream: str | None, *, as_json: bool) -> None:
    """All streams, or the histogram of one; NotFound if the page has no such stream."""
    stats = page_stats(view.record, view.spec)
    if stream is not None:
        stats = [_named(stats, stream)]
    if as_json:
        print_json(_page_fields(view, stats))
        return
    out = console()
    out.print(fields({**view.place.cells(view.header.layer), **_header_cells(view)}))
    out.print()
    _print_streams(stats, out)
    if stream is not None:
        out.print()
        out.print(histogram_table(stats[0], unicode=is_unicode(out)))


def _named(stats: list[StreamStats], name: str) -> StreamStats:
    for one in stats:
        if one.stream.name == name:
            return one
    raise NotFound(
        f"the page has no stream {name!r}",
        doing="inspecting a page",
        remedy=f"It has {', '.join(one.stream.name for one in stats)}",
    )


def _header_cells(view: PageView) -> dict[str, Cell]:
    header, spec = view.header, view.spec
    tokens = view.block.tokens.tolist()
    cells: dict[str, Cell] = {
        "block": header.block_hash.hex(),
        "parent": "none: the first block" if view.block.is_first else view.block.parent.hex(),
        "tokens": f"{header.num_tokens}: {' '.join(map(str, tokens))}",
        "codecs": f"keys {spec.keys}, values {spec.values}, rotation {spec.rotation}",
        "shape": f"{spec.kv_heads} heads, {spec.page_tokens} tokens, "
        f"key dim {spec.key_dim}, value dim {spec.value_dim}, {spec.dtype}",
        "bytes": f"{spec.page_nbytes:,} ({size(spec.page_nbytes)}), "
        f"{spec.page_nbytes / spec.dense_nbytes:.2f} of {spec.dtype}",
        "bits": f"{spec.key_bits:.3g} a key element, {spec.value_bits:.3g} a value element, "
        "side data included",
        "checksum": Text(view.fault, "red") if view.fault else Text("good", "green"),
    }
    if header.choice_digest != NO_CHOICE:
        cells["choice"] = header.choice_digest.hex()
    return cells


def _print_streams(stats: list[StreamStats], out: Output) -> None:
    """One table, or two below each other where the terminal is too narrow for it."""
    whole = _stream_table(stats, out, (*_LAYOUT, *_CONTENT, *_SHAPE), NUM_BINS)
    if fits(out, whole):
        out.print(whole)
        return
    out.print(_stream_table(stats, out, (*_LAYOUT, *_CONTENT), 0))
    out.print()
    out.print(_stream_table(stats, out, _SHAPE, NUM_BINS // 2))


def _stream_table(
    stats: list[StreamStats], out: Output, columns: tuple[str, ...], num_bins: int
) -> Table:
    text = ("DTYPE", "SHAPE", "DISTRIBUTION")
    made = table("STREAM", *columns, right=[name for name in columns if name not in text])
    for one in stats:
        cells = _stream_cells(one, out, num_bins)
        made.add_row(one.stream.name, *(cells[name] for name in columns))
    return made


def _stream_cells(one: StreamStats, out: Output, num_bins: int) -> dict[str, Cell]:
    return {
        "DTYPE": one.stream.dtype if one.bits in (None, 8) else f"{one.bits}-bit codes",
        "SHAPE": "x".join(map(str, one.stream.shape)),
        "OFFSET": f"{one.stream.offset:,}",
        "BYTES": f"{one.stream.nbytes:,}",
        "ZEROS": f"{100 * one.num_zeros / one.num_elements:.2g}%",
        "ENTROPY": f"{one.entropy:.2f} b" if one.entropy is not None else "",
        "MIN": number(one.minimum),
        "MAX": number(one.maximum),
        "MEAN": number(one.mean),
        "STD": number(one.std),
        "DISTRIBUTION": _distribution(one, out, num_bins) if num_bins else "",
    }


def _distribution(stats: StreamStats, out: Output, num_bins: int) -> Text:
    not_finite = stats.num_nan + stats.num_infinite
    bars = small_bars(rebinned(stats.counts, num_bins), unicode=is_unicode(out))
    if not_finite:
        return Text.assemble((f"{not_finite:,} not finite ", "red"), bars)
    return Text(bars, "cyan")


def _page_fields(view: PageView, stats: list[StreamStats]) -> dict[str, Any]:
    return {
        **view.place.fields,
        "header": {
            "layer": view.header.layer,
            "num_tokens": view.header.num_tokens,
            "block_hash": view.header.block_hash,
            "spec_digest": view.header.spec_digest,
            "choice_digest": view.header.choice_digest,
        },
        "fault": view.fault,
        "parent": None if view.block.is_first else view.block.parent,
        "tokens": view.block.tokens.tolist(),
        "page_spec": view.spec.fields,
        "page_nbytes": view.spec.page_nbytes,
        "dense_nbytes": view.spec.dense_nbytes,
        "key_bits": view.spec.key_bits,
        "value_bits": view.spec.value_bits,
        "streams": [one.fields for one in stats],
    }
