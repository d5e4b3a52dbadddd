"""F7: the command line.  One file a command, plus what commands share.

`app` joins them; `options`, `opening` and `output` are the shared frame; `catalog`, `session_view`,
`pack_view`, `page_view` and `stream_stats` gather and draw what is shown.  Nothing here decodes a
codec or loads MLX.
"""

from __future__ import annotations

import sys
import traceback

USAGE_EXIT = 2
INTERRUPTED_EXIT = 130
BUG_EXIT = 10


def main() -> None:
    """The console script `tqstore`.  Always leaves through SystemExit, with docs/cli.md's codes."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"tqstore: {error.name} is missing: in a clone of tqstore, pip install '.[cli]'\n"
        )
        sys.exit(USAGE_EXIT)
    try:
        from tqstore.cli.app import app

        app(prog_name="tqstore")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT)
    except Exception:
        # Python's own exit code for this would be 1, which means findings here.
        traceback.print_exc()
        sys.stderr.write(
            "tqstore: this is a bug in tqstore, please report it with the lines above\n"
        )
        sys.exit(BUG_EXIT)
