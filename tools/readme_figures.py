"""Puts the demo's figures into README.md, between its markers.

`python -m tools.readme_figures FILE`, where FILE is what `tools/demo --json FILE` wrote.  No figure
in the README is typed by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- figures: tools/readme_figures.py -->\n"
END = "<!-- end of figures -->\n"
MIB = 1 << 20


def section(figures: dict[str, Any]) -> str:
    """The table, as Markdown."""
    cold, resumed = figures["cold_ttft_s"], figures["resume_ttft_s"]
    codecs = f"{figures['keys']} keys, {figures['values']} values"
    rows = [
        ("`tools/demo`: Gemma 3 270M on two CPU cores", "without", "with tqstore"),
        ("---", "---", "---"),
        (
            "time to the first token of the next answer",
            f"{cold:.2f} s",
            f"{resumed:.2f} s ({cold / resumed:.0f}x sooner)",
        ),
        (
            "tokens of the prompt that are not read again",
            "0",
            f"{figures['tokens_reused']:,} of {figures['prompt_tokens']:,}",
        ),
        (
            "bytes of keys and values",
            f"{figures['bytes_dense'] / MIB:.1f} MiB in {figures['dense_dtype']}",
            f"{figures['bytes_on_disk'] / MIB:.1f} MiB on disk ({codecs}), all overheads in",
        ),
        (
            "the answers, against a run that was never stopped",
            "",
            "equal, token for token" if figures["identical"] else "NOT equal",
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def replaced(text: str, figures: dict[str, Any]) -> str:
    """`text` with what stands between the markers replaced; ValueError without the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + BEGIN + section(figures) + END + after


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(), json.loads(Path(sys.argv[1]).read_text())))
