"""What the system says a process has in RAM while a long prompt is prefilled; no time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tqstore.layer_cache import TRANSIENT_NBYTES

NUM_TOKENS, BUDGET = 16384, 16 << 20
# What is being encoded or written out beside the pool, and as much again for buffers that MLX and
# malloc keep for reuse.
BESIDE = 2 * TRANSIENT_NBYTES


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a peak since a moment"
)
def test_a_prefill_grows_the_process_by_its_budget_and_not_with_the_prompt(store_dir: Path) -> None:
    command = [sys.executable, "-m", "tests.prefill_process", store_dir, NUM_TOKENS, BUDGET]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    # All of the prompt's pages would not fit what is allowed, so the pool did bound them.
    assert report["spilled_nbytes"] > BUDGET + BESIDE
    assert report["grown_nbytes"] <= BUDGET + BESIDE, report
