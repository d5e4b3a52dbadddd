"""Looking at one pack or one page from outside, as `tqstore inspect` does.

Reads files given by path, each with its namespace beside it; checks everything it shows and says
what is wrong instead of refusing, as far as there is something to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tqstore.errors import Corrupt, InvalidInput, NotFound
from tqstore.format.framing import crc32c
from tqstore.format.namespace import MAX_NBYTES as MAX_NAMESPACE_NBYTES
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackHeader, PackLayout, pack_header_nbytes
from tqstore.format.page import PageHeader, bfloat16_to_float32, stream_arrays
from tqstore.spec import PageSpec, StreamSpec
from tqstore.store.files import Files, failure
from tqstore.store.folder import Folder
from tqstore.store.names import pack_number
from tqstore.store.root import NAMESPACE_FILE, NAMESPACES, PAGES, open_below


@dataclass(frozen=True)
class PackView:
    """One pack file.  `header.page_keys[slot]` is (layer, block hash) of each page."""

    path: Path
    namespace: Namespace
    spec: PageSpec
    layout: PackLayout
    header: PackHeader
    header_nbytes: int
    file_nbytes: int

    @property
    def first_slot(self) -> int:
        return self.layout.first_slot(self.header_nbytes)


@dataclass(frozen=True)
class StreamView:
    """One stream of a page.  `array` is as stored; bfloat16 comes as float32, which is exact."""

    spec: StreamSpec
    array: npt.NDArray[Any]

    def statistics(self) -> dict[str, float]:
        """Minimum, maximum, mean and standard deviation of the stored numbers, in float64."""
        numbers = self.array.astype(np.float64)
        return {
            "min": float(numbers.min()),
            "max": float(numbers.max()),
            "mean": float(numbers.mean()),
            "std": float(numbers.std()),
        }


@dataclass(frozen=True)
class PageView:
    """One page.  `problem` says why it must not be used, None if it is sound."""

    slot: int
    header: PageHeader
    streams: tuple[StreamView, ...]
    checksum: int
    problem: str | None


def list_packs(store_path: Path) -> list[Path]:
    """Every pack file of a store, oldest first."""
    found = store_path.glob(f"{NAMESPACES}/*/{PAGES}/*/c.*.0")
    return sorted(
        (path for path in found if pack_number(path.name) is not None),
        key=lambda path: (path.parent, pack_number(path.name)),
    )


def view_pack(path: Path) -> PackView:
    """The pack at `path`, which must lie in a store.

    Raises InvalidInput for a path that isn't a pack's, NotFound, Corrupt, Incompatible.
    """
    path = path.expanduser().absolute()
    if pack_number(path.name) is None or path.parent.parent.name != PAGES:
        raise InvalidInput(f"{path} is not a pack of a store", remedy="Packs are named c.<n>.0")
    namespace = _namespace(path.parents[2])
    spec = next((s for s in namespace.page_specs if s.name == path.parent.name), None)
    if spec is None:
        raise Corrupt(str(path.parent), "is not a page spec of its namespace")
    with _open(path.parent) as folder, folder.reading(path.name) as (fd, file_nbytes):
        limit = 64 + PackLayout.of(spec).max_header_nbytes
        raw = folder.read_range(path.name, fd, 0, min(limit, file_nbytes))
    header = PackHeader.decode(raw, spec, str(path))
    nbytes = pack_header_nbytes(raw, spec, str(path))
    return PackView(path, namespace, spec, PackLayout.of(spec), header, nbytes, file_nbytes)


def view_page(pack: PackView, slot: int) -> PageView:
    """The page in a slot; InvalidInput if the pack has no such slot, Corrupt if it is cut off."""
    if not 0 <= slot < pack.header.num_pages:
        raise InvalidInput(
            f"{pack.path} has no page {slot}", remedy=f"It has 0 to {pack.header.num_pages - 1}"
        )
    layout = pack.layout
    with _open(pack.path.parent) as folder, folder.reading(pack.path.name) as (fd, file_nbytes):
        at = pack.first_slot + slot * layout.stride
        if file_nbytes < at + layout.page_nbytes + 4:
            raise Corrupt(str(pack.path), "the file ends inside the page", page=slot)
        raw = folder.read_range(pack.path.name, fd, at, layout.page_nbytes + 4)
    record = np.frombuffer(raw, np.uint8, layout.page_nbytes)
    header = PageHeader.decode(record, str(pack.path), slot)
    checksum = int.from_bytes(raw[layout.page_nbytes :], "little")
    problem = None
    if crc32c(record) != checksum:
        problem = "bad checksum"
    elif (header.layer, header.block_hash) != pack.header.page_keys[slot]:
        problem = "its header names another page than the pack's"
    elif header.spec_digest != pack.spec.digest:
        problem = "its header names another page spec"
    streams = tuple(
        StreamView(spec, bfloat16_to_float32(array) if spec.dtype == "bfloat16" else array)
        for spec, array in zip(
            pack.spec.streams, stream_arrays(record, pack.spec).values(), strict=True
        )
    )
    return PageView(slot, header, streams, checksum, problem)


def _namespace(folder_path: Path) -> Namespace:
    with _open(folder_path) as folder:
        raw = folder.read(NAMESPACE_FILE, MAX_NAMESPACE_NBYTES)
        return Namespace.decode(raw, folder.path_of(NAMESPACE_FILE))


def _open(path: Path) -> Folder:
    sealed = open_below(path)
    if sealed is not None:
        return sealed
    files = Files()
    try:
        return Folder(files, files.open_root(str(path)), str(path))
    except FileNotFoundError as error:
        raise NotFound(f"there is no folder {path}", doing="inspecting") from error
    except OSError as error:
        raise failure(error, "inspecting", str(path)) from error
