"""A session read for inspection: its checkpoints, its newest state, and where its pages are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from tqstore.cli.opening import opened_root
from tqstore.errors import NotFound, TqStoreError
from tqstore.format.checkpoint import Checkpoint, CheckpointSummary, summarize
from tqstore.format.namespace import Namespace
from tqstore.spec import PageSpec
from tqstore.store.folder import Folder
from tqstore.store.names import checkpoint_name, pack_name, session_folder
from tqstore.store.page_store import NamespaceStore, PageStore
from tqstore.store.records import Location
from tqstore.store.root import NAMESPACES, PAGES, SESSIONS
from tqstore.store.sessions import read_summary, sequences


@dataclass(frozen=True)
class KeptCheckpoint:
    """One checkpoint file; `problem` if it cannot be read, numbers are 0 then."""

    file: str
    num_tokens: int = 0
    nbytes: int = 0
    created_ns: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike: page spec, window, sinks, tail, and pages needed and missing."""

    layers: tuple[int, ...]
    spec: PageSpec
    window: int | None
    sink_tokens: int
    tail_start: int
    tail_nbytes: int
    num_needed: int
    num_missing: int

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "page_spec": self.spec.fields,
            "window": self.window,
            "sink_tokens": self.sink_tokens,
            "tail_start": self.tail_start,
            "tail_nbytes": self.tail_nbytes,
            "pages_needed": self.num_needed,
            "pages_missing": self.num_missing,
        }


@dataclass(frozen=True)
class SessionContents:
    """The newest valid checkpoint of a session; `packs` maps a pack's path to the pages used."""

    name: str
    kept: list[KeptCheckpoint]
    checkpoint: Checkpoint
    namespace: Namespace
    groups: list[LayerGroup]
    packs: dict[str, int]

    @property
    def num_missing(self) -> int:
        return sum(group.num_missing * len(group.layers) for group in self.groups)


def read_session(store: PageStore, name: str) -> SessionContents:
    """NotFound for no such session, Corrupt if none of its checkpoints can be read."""
    checkpoint = store.latest(name)
    namespace = store.stored_namespace(checkpoint.namespace_id)
    require_layers(name, checkpoint, namespace)
    ns = store.namespace(namespace)
    packs: Counter[str] = Counter()
    alike: dict[tuple[Any, ...], list[int]] = {}
    summary = summarize(checkpoint, name, 1)
    for layer, (tail, spec) in enumerate(zip(checkpoint.layers, namespace.layers, strict=True)):
        needed = list(summary.needed_blocks(layer))
        found = _locate(ns, summary, layer)
        packs.update(pack_path(ns, spec, location) for location in found)
        nbytes = tail.keys.nbytes + tail.values.nbytes
        counts = (len(needed), len(needed) - len(found))
        key = (spec, tail.window, tail.sink_tokens, tail.start, nbytes, *counts)
        alike.setdefault(key, []).append(layer)
    return SessionContents(
        name=name,
        kept=_kept(store, name),
        checkpoint=checkpoint,
        namespace=namespace,
        groups=[LayerGroup(tuple(layers), *key) for key, layers in alike.items()],
        packs=dict(sorted(packs.items())),
    )


def require_layers(name: str, checkpoint: Checkpoint, namespace: Namespace) -> None:
    """NotFound unless the namespace has the checkpoint's layers."""
    if len(checkpoint.layers) != len(namespace.layers):
        raise NotFound(
            f"the checkpoint has {len(checkpoint.layers)} layers, its namespace "
            f"{len(namespace.layers)}",
            doing=f"inspecting session {name!r}",
            remedy="`tqstore verify` tells what is damaged",
        )


def pack_path(ns: NamespaceStore, spec: PageSpec, location: Location) -> str:
    """From the store's folder on, as `inspect` takes it."""
    return str(PurePath(NAMESPACES, ns.folder_name, PAGES, spec.name, pack_name(location.pack)))


def _locate(ns: NamespaceStore, summary: CheckpointSummary, layer: int) -> list[Location]:
    spec = ns.namespace.layers[layer]
    places = (ns.locate(spec, layer, block) for block in summary.needed_blocks(layer))
    return [place for place in places if place is not None]


def _kept(store: PageStore, name: str) -> list[KeptCheckpoint]:
    """Newest first; what another process prunes meanwhile is left out."""
    with (
        opened_root(store) as root,
        root.child(SESSIONS) as parent,
        parent.child(session_folder(name)) as folder,
    ):
        found = (_checkpoint(folder, sequence) for sequence in sequences(folder))
        return [kept for kept in found if kept is not None]


def _checkpoint(folder: Folder, sequence: int) -> KeptCheckpoint | None:
    file = checkpoint_name(sequence)
    try:
        summary, nbytes = read_summary(folder, sequence)
    except NotFound:
        return None
    except TqStoreError as error:
        return KeptCheckpoint(file, problem=str(error))
    return KeptCheckpoint(file, summary.num_tokens, nbytes, summary.created_ns)
