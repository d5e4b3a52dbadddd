"""One model's side of a session: its cache list, and the way to its checkpoints.

Owns starting anew, resuming, rewinding and saving one model's cache list as a whole, paged layers
and own objects together.  Does not own tokens (the Session's) nor what is fed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache as OwnKVCache

from tqstore.errors import NotFound
from tqstore.kv_cache import KVCache
from tqstore.mlx_lm.cache import PagedLayerCache, PagedSequence, cache_list
from tqstore.mlx_lm.own_states import collect, leaf_of, restore
from tqstore.mlx_lm.probe import ModelLayout
from tqstore.resuming import Match
from tqstore.saved_state import NamedState
from tqstore.session import SaveReport, Store
from tqstore.spec import CacheSpec

UNFINISHED = "a step did not get to the end"


@dataclass(frozen=True)
class Taken:
    """The tokens and metadata of a checkpoint taken up, and why it is not all or none."""

    tokens: list[int]
    metadata: dict[str, Any]
    reason: str


@dataclass
class ModelLine:
    """A model in a session.  `cache` is the list to generate with; it stays the same object.

    Either all of the list is at `num_tokens` tokens, or it has just been started anew.
    """

    store: Store
    model: Module
    name: str
    layout: ModelLayout
    spec: CacheSpec
    fingerprint: str
    memory_budget: int | None = None
    packed_attention: bool = True
    cache: list[Any] = field(default_factory=list)
    kv: KVCache = field(init=False)

    def __post_init__(self) -> None:
        self.start_anew()

    @property
    def num_tokens(self) -> int:
        return self.kv.num_tokens

    def start_anew(self) -> None:
        """Replaces whatever the list holds by an empty cache."""
        self._adopt(
            self.store.new_cache(
                self.spec, model=self.fingerprint, memory_budget=self.memory_budget
            )
        )

    def resume(self) -> Taken:
        """Takes up the named checkpoint, or as much of it as is left.

        Raises Incompatible if it belongs to other weights, codecs or cache objects; the list
        is then as before.
        """
        try:
            resumed = self.store.resume(
                self.name,
                spec=self.spec,
                model=self.fingerprint,
                memory_budget=self.memory_budget,
            )
        except NotFound as error:
            is_known = any(info.name == self.name for info in self.store.sessions())
            return Taken([], {}, str(error) if is_known else "")
        if resumed.tokens is None:
            return Taken([], resumed.metadata, "records of its first tokens are gone")
        self._adopt(resumed.cache, resumed.states)
        return Taken(resumed.tokens, resumed.metadata, resumed.reason)

    def find(self, tokens: Sequence[int]) -> Match:
        """The longest prefix of `tokens` that any session of this model has stored.

        At least one token is left over.  The list is as before until `take_up`.
        """
        if self.layout.own:
            return Match(0, None, "the model's own states are not part of pages")
        return self.store.match(
            tokens, spec=self.spec, model=self.fingerprint, memory_budget=self.memory_budget
        )

    def take_up(self, match: Match) -> None:
        """Replaces what the list holds by a prefix that `find` found."""
        assert match.cache is not None, "found nothing"
        self._adopt(match.cache)

    def settle(self) -> str:
        """Puts in order what a step that failed left behind; empty, or why that cannot be."""
        if not self.kv.is_torn and not self.kv.is_readable():
            return "pages can no longer be read"
        return self.even_out()

    def even_out(self) -> str:
        """Layers that are ahead forget what others have not seen; empty, or why that cannot be.

        States of the model's own cannot tell what they have seen.
        """
        if self.kv.is_torn:
            return "a layer was interrupted while it changed"
        if self._sequence.is_in_step:
            return ""
        if self.layout.own or not self._sequence.even_out():
            return UNFINISHED
        return ""

    @property
    def _sequence(self) -> PagedSequence:
        leaves = [leaf for entry in self.cache for leaf in getattr(entry, "caches", [entry])]
        return next(leaf.sequence for leaf in leaves if isinstance(leaf, PagedLayerCache))

    def last_exact(self, num_tokens: int) -> int:
        """The longest length up to `num_tokens` to go back to without decoding a page.

        A page that is re-opened is coded a second time when it is sealed again, and once more at
        every further answer to the same prompt.
        """
        packed = [
            layer.tail_start
            for layer in self.kv.layers
            if {layer.page_spec.keys.kind, layer.page_spec.values.kind} != {"exact"}
        ]
        if num_tokens >= max(packed, default=0):
            return num_tokens
        return num_tokens // self.spec.page_tokens * self.spec.page_tokens

    def rewind(self, num_tokens: int) -> str:
        """Forgets all tokens from `num_tokens` on; empty, or why that is impossible.

        What is impossible leaves the list as it was.
        """
        count = self.num_tokens - num_tokens
        if count == 0:
            return ""
        own = [(item, leaf_of(self.cache, item)) for item in self.layout.own]
        used = [(item, leaf) for item, leaf in own if not leaf.empty()]
        for item, leaf in used:
            # Other classes that call themselves trimmable are not exact: a ChunkedKVCache has
            # dropped tokens that the shorter sequence would look at.
            if type(leaf) is not OwnKVCache or leaf.offset != self.num_tokens:
                return f"entry {item.entry} ({item.class_name}) can only be reused whole"
        if not self.kv.can_trim(count):
            return f"a windowed layer cannot go back {count} tokens"
        self.kv.trim(count)
        for _, leaf in used:
            leaf.trim(count)
        return ""

    def save(self, tokens: Sequence[int], metadata: Mapping[str, Any]) -> SaveReport:
        """A checkpoint of the list, which holds exactly `tokens`."""
        return self.store.save(
            self.name,
            self.kv,
            list(tokens),
            states=collect(self.cache, self.layout),
            metadata=dict(metadata),
        )

    def _adopt(self, kv: KVCache, states: Sequence[NamedState] | None = None) -> None:
        """Takes `kv`, and `states` of the model's own objects, which are new without."""
        entries = cache_list(self.model, self.layout, kv, packed_attention=self.packed_attention)
        if states is not None:
            restore(entries, self.layout, states)
        # Together, and only now: an error or an interrupt before leaves what was there.
        self.kv = kv
        self.cache[:] = entries
