"""How much memory the hot pool may take unless it is told."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
DEFAULT_SHARE = 0.5


def available_nbytes() -> int:
    """Memory that can be used without swapping; all there is where the system does not say."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_budget() -> int:
    """Bytes of hot pages a cache may hold: half of what is available now."""
    return int(available_nbytes() * DEFAULT_SHARE)
