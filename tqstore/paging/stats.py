"""Counters of what paging did, for anyone to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PagingStats:
    """Since the pool was made; shared by all sequences of the pool.  Bytes are page bytes."""

    sealed_pages: int = 0
    hits: int = 0
    restored_pages: int = 0
    restored_nbytes: int = 0
    shared_pages: int = 0
    streamed_pages: int = 0
    streamed_nbytes: int = 0
    spilled_pages: int = 0
    spilled_nbytes: int = 0
    spill_waits: int = 0
    failed_spills: int = 0
    evicted_pages: int = 0
    expired_pages: int = 0
    reopened_pages: int = 0
