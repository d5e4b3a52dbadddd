"""zarr.json of a page spec's folder: what makes its packs readable by any zarr v3 reader."""

from __future__ import annotations

import json
from typing import Any

from tqstore.format.format_file import FORMAT_VERSION
from tqstore.format.pack import PackLayout
from tqstore.spec import PAGE_HEADER_NBYTES, PageSpec

# Packs are numbered by the microsecond of their making, so a number is never used twice; 2^52
# microseconds after 1970 is the year 2112.
MAX_PACKS = 1 << 52


def zarr_metadata(spec: PageSpec) -> bytes:
    """The exact bytes of zarr.json: row n * max_pages + slot is the page in that slot of pack n."""
    return (json.dumps(_metadata(spec), indent=2, sort_keys=True) + "\n").encode()


def _metadata(spec: PageSpec) -> dict[str, Any]:
    layout = PackLayout.of(spec)
    row = [1, spec.page_nbytes]
    endian = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": row,
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        "index_codecs": [endian, {"name": "crc32c"}],
        "index_location": "end",
    }
    shard_shape = [layout.max_pages, spec.page_nbytes]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [layout.max_pages * MAX_PACKS, spec.page_nbytes],
        "data_type": "uint8",
        "fill_value": 0,
        "dimension_names": ["page", "byte"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"tqstore": _attributes(spec, layout)},
    }


def _attributes(spec: PageSpec, layout: PackLayout) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "page_spec": spec.fields,
        "page_spec_digest": spec.digest.hex(),
        "alignment": layout.alignment,
        "stride": layout.stride,
        "header_nbytes": PAGE_HEADER_NBYTES,
        "streams": [
            {"name": s.name, "dtype": s.dtype, "shape": list(s.shape), "offset": s.offset}
            for s in spec.streams
        ],
    }
