"""The worked example of docs/format.md: a whole small store's records, as bytes.

`python -m tests.format.worked_example` writes it into the document between its two markers; a test
checks that the document holds what the code produces.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tqstore.format.block_hash import chain_blocks
from tqstore.format.checkpoint import Checkpoint, encode_checkpoint
from tqstore.format.format_file import FormatFile
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackHeader, PackLayout, pack_buffers
from tqstore.format.page import stamp_headers
from tqstore.spec import CodecSpec, PageSpec

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
BEGIN = "<!-- worked example: written by tests/format/worked_example.py -->\n"
END = "<!-- end of worked example -->\n"
EXACT = CodecSpec.parse("exact")


def hex_dump(data: bytes) -> str:
    """16 bytes a line; runs of equal lines as one `*`, as hexdump writes them."""
    lines: list[str] = []
    previous: bytes | None = None
    for at in range(0, len(data), 16):
        line = data[at : at + 16]
        if line == previous:
            if lines[-1] != "*":
                lines.append("*")
            continue
        previous = line
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        lines.append(f"{at:08x}  {line.hex(' '):<47}  |{text}|")
    lines.append(f"{len(data):08x}")
    return "\n".join(lines)


def example() -> str:
    spec = PageSpec(1, 8, 8, 2, EXACT, EXACT, "float16", "haar")
    namespace = Namespace.of("00" * 8, [spec], parts={"weights": "w"})
    [block] = chain_blocks(namespace.id, [5, -1], 2)
    keys = [(0, block.hash)]
    record = np.zeros((1, spec.page_nbytes), np.uint8)
    numbers = np.arange(16, dtype="<f2")
    record[0, 64:96] = numbers.view(np.uint8)
    record[0, 128:160] = (-numbers).view(np.uint8)
    stamp_headers(record, spec, keys)
    header = PackHeader.of(spec, [block], keys).encode()
    pack = b"".join(bytes(buffer) for buffer in pack_buffers(PackLayout.of(spec), header, record))
    checkpoint = Checkpoint(namespace.id, 2, 2, (block.hash,), b"", ())
    parts = [
        ("FORMAT, uuid zeros, made at time 0", FormatFile(bytes(16), 0).encode()),
        ("namespace.msgpack: model 0000000000000000, one layer", namespace.encode()),
        ("c.<n>.0: a pack with the page of layer 0 of the block of tokens 5, -1", pack),
        (
            "a checkpoint's two frames: session `demo`, sequence 1, that block, no layer, no tail",
            encode_checkpoint(checkpoint, "demo", 1),
        ),
    ]
    facts = f"""Keys are the float16 numbers 0 to 15, values their negatives.

| | |
|---|---|
| namespace id | `{namespace.id.hex()}` |
| page spec | `{spec.name}` |
| its digest | `{spec.digest.hex()}` |
| block hash | `{block.hash.hex()}` |
"""
    dumps = [f"{title}:\n\n```\n{hex_dump(data)}\n```\n" for title, data in parts]
    return facts + "\n" + "\n".join(dumps)


def main() -> None:
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(before + BEGIN + example() + END + after)


if __name__ == "__main__":
    main()
