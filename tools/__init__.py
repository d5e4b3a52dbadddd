"""Programs for people who work on tqstore: the demo, the real test model, measurements."""
