"""The codecs on a machine with no C++ compiler: MLX then runs the same graphs unfused."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.quant.cases import codec_of, page_spec, vectors

NAMES = ("prod4", "mse3", "mse8", "uni4", "int8")
SCRIPT = f"""
import sys
import numpy as np
from tests.quant.cases import codec_of, page_spec, vectors
arrays = {{}}
for name in {NAMES!r}:
    codec = codec_of(page_spec(name, 128))
    streams = codec.encode(vectors(2, 2, 16, 128))
    arrays |= {{f"{{name}}.{{key}}": np.array(value) for key, value in streams.items()}}
    arrays[f"{{name}}.decoded"] = np.array(codec.decode(streams))
np.savez(sys.argv[1], **arrays)
"""


@pytest.mark.parametrize("how", ["no-path", "disabled"])
def test_streams_and_decoded_vectors_are_the_same(how: str, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if how == "no-path":
        environment |= {"PATH": str(tmp_path)}
    else:
        environment |= {"MLX_DISABLE_COMPILE": "1"}
    file = tmp_path / "streams.npz"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", SCRIPT, str(file)], env=environment, check=True, cwd=root)
    with np.load(file) as unfused:
        for name in NAMES:
            codec = codec_of(page_spec(name, 128))
            streams = codec.encode(vectors(2, 2, 16, 128))
            decoded = mx.array(unfused[f"{name}.decoded"])
            assert mx.allclose(decoded, codec.decode(streams), atol=1e-3, rtol=1e-3)
            for key in ("codes", "signs"):
                if key in streams:
                    same = np.array(streams[key]) == unfused[f"{name}.{key}"]
                    assert same.mean() > 0.999  # a fused multiply-add may move one on a border
