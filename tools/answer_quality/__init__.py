"""How well a model answers with each cache: `tools/quality`."""
