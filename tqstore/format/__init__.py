"""F1: bytes <-> records.  Everything docs/format.md specifies, and no file is touched here.

One module a record: `format_file`, `namespace`, `block_hash`, `page`, `pack`, `zarr_metadata`,
`checkpoint`; `framing` and `plain` are what they share.  Every decoder takes hostile bytes: only
TqStoreError comes out, and memory stays in proportion to the bytes given.
"""
