"""Feeds the format's decoders with bytes chosen by coverage, for as long as asked.

Needs atheris (`pip install atheris`), which is no dependency.  tests/store/test_fuzz.py feeds the
same decoders at every run of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__)
    parser.add_argument("target", help="FORMAT, namespace, pack-header, page, checkpoint, summary")
    parser.add_argument("--seconds", type=int, default=60)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    try:
        import atheris
    except ImportError:
        sys.exit("tools/fuzz needs atheris: pip install atheris")
    with atheris.instrument_imports(include=["tqstore"]):
        from tools.faults.decoders import FRAMES, TARGETS, bodies, framed, sound
        from tqstore.errors import TqStoreError
        from tqstore.format.framing import FRAME_NBYTES, write_frame

    target = options.target.replace("-", " ")
    if target not in TARGETS:
        sys.exit(f"no such target: {target}; there are {', '.join(TARGETS)}")

    def feed(data: bytes) -> None:
        """The bytes as they are, and as the body of a frame with right checksums."""
        with contextlib.suppress(TqStoreError):
            TARGETS[target](data)
        if target in FRAMES:
            with contextlib.suppress(TqStoreError):
                TARGETS[target](write_frame(FRAMES[target][0], 1, data))

    with tempfile.TemporaryDirectory() as corpus:
        Path(corpus, "sound").write_bytes(sound(target))
        if target in FRAMES:
            Path(corpus, "body").write_bytes(framed(target, bodies(target))[FRAME_NBYTES:])
        limits = [f"-max_total_time={options.seconds}", "-rss_limit_mb=1024", "-timeout=5"]
        atheris.Setup([sys.argv[0], *limits, corpus], feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
