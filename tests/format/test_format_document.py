"""docs/format.md holds the bytes this code writes, and every constant it names."""

from __future__ import annotations

from tests.format.worked_example import BEGIN, DOCUMENT, END, example
from tqstore.format import checkpoint, format_file, namespace, pack, page


def test_the_worked_example_is_what_the_code_writes() -> None:
    written = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert written == example()


def test_every_magic_is_documented() -> None:
    text = DOCUMENT.read_text()
    for magic in (
        format_file.MAGIC,
        namespace.MAGIC,
        pack.MAGIC,
        checkpoint.MAGIC,
        checkpoint.STATE_MAGIC,
        page.PAGE_MAGIC,
    ):
        assert f"`{magic.decode()}`" in text
