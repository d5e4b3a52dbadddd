"""F2: the durable half.  Pages, namespaces and checkpoints in files that survive any crash.

`page_store` is the way in.  `files` does every file operation, `folder` the durable ones made of
them; docs/format.md says what is in the files, docs/durability.md why it is written so.
"""
