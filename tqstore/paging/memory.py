"""How much memory there is, how much the process uses, and what the hot pool may take of it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
DEFAULT_SHARE = 0.5


def available_nbytes() -> int:
    """Memory that can be used without swapping; all there is where the system does not say."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process_nbytes() -> int:
    """Memory of this process that is in RAM now; where the system does not say, its peak."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def default_budget() -> int:
    """Bytes of hot pages a cache may hold: half of what is available now."""
    return int(available_nbytes() * DEFAULT_SHARE)
