"""What a commit refuses before it writes anything."""

from __future__ import annotations

from collections.abc import Sequence

from tqstore.errors import InvalidInput
from tqstore.format.block_hash import BlockRecord, block_hash
from tqstore.format.checkpoint import Checkpoint
from tqstore.format.namespace import Namespace
from tqstore.format.page import PageKey
from tqstore.spec import PageSpec


def check_keys(
    namespace: Namespace, spec: PageSpec, blocks: Sequence[BlockRecord], keys: Sequence[PageKey]
) -> None:
    """InvalidInput unless the keys are pages of `spec` and their blocks are given and genuine."""
    layers = namespace.layers
    for layer in {layer for layer, _ in keys}:
        if not 0 <= layer < len(layers) or layers[layer] != spec:
            raise InvalidInput(f"layer {layer} of this namespace has not the page spec {spec.name}")
    unknown = {name for _, name in keys} - {block.hash for block in blocks}
    if unknown:
        raise InvalidInput(f"block {unknown.pop().hex()} of a page was not given")
    for block in blocks:
        if len(block.tokens) != spec.page_tokens or (
            block.is_first and block.parent != namespace.id
        ):
            raise InvalidInput(f"block {block.hash.hex()} is not one of this namespace")
        if block_hash(block.parent, block.token_bytes) != block.hash:
            raise InvalidInput(f"block {block.hash.hex()} is not the hash of its parent and tokens")


def check_fits(namespace: Namespace, checkpoint: Checkpoint) -> None:
    """InvalidInput unless the checkpoint's layers and tails are those of the namespace."""
    if checkpoint.page_tokens != namespace.page_tokens:
        raise InvalidInput(
            f"page_tokens {checkpoint.page_tokens}, the namespace's is {namespace.page_tokens}"
        )
    if len(checkpoint.layers) != len(namespace.layers):
        raise InvalidInput(
            f"{len(checkpoint.layers)} layers, the namespace has {len(namespace.layers)}"
        )
    for i, (tail, spec) in enumerate(zip(checkpoint.layers, namespace.layers, strict=True)):
        found = (tail.keys.dtype, tail.keys.shape[0], tail.keys.shape[2], tail.values.shape[2])
        wanted = (spec.dtype, spec.kv_heads, spec.key_dim, spec.value_dim)
        if found != wanted:
            raise InvalidInput(
                f"layer {i}'s tail has (dtype, heads, key dim, value dim) {found}, not {wanted}"
            )
