"""The benchmarks, one a module: `save_full.run` is `tools/bench --only save-full`."""
