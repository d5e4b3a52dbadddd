"""Measurements of tqstore against named peers.

A benchmark is one module in `cases/` with one function, `run(workshop) -> list[Row]`; the module's
name is the benchmark's.  Nothing else has to be told of it.
"""
