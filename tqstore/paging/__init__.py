"""Where pages are and how they move: page tables, the hot pool, the pager.

Owns tiers and residency.  Knows nothing of codebooks (a page is a record of bytes here) and does no
file operation itself (the store does).
"""
