"""Which pages the checkpoints of a store need: what gc must keep.

Reads summaries only.  Can be brought up to date cheaply, since checkpoints never change: only those
that came since are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tqstore.errors import Corrupt, NotFound
from tqstore.format.checkpoint import CheckpointSummary
from tqstore.format.namespace import Namespace
from tqstore.format.pack import PackLayout
from tqstore.spec import PageSpec
from tqstore.store.folder import Folder
from tqstore.store.names import checkpoint_name, is_session_folder
from tqstore.store.pack_index import SETTLE_NS
from tqstore.store.root import SESSIONS
from tqstore.store.sessions import read_summary, sequences

Masks = dict[bytes, int]  # block hash -> bit l is set for the page of layer l


@dataclass(frozen=True)
class SessionUse:
    """One session as gc sees it: its newest readable checkpoint, and what all of them take."""

    folder_name: str
    name: str
    sequence: int
    namespace_id: bytes
    expires_ns: int
    used_ns: int
    nbytes: int


def needed_masks(summary: CheckpointSummary) -> Masks:
    """The pages a resume of this checkpoint needs."""
    layers: dict[tuple[int | None, int, int], int] = {}
    for layer, reach in enumerate(summary.reach):
        layers[reach] = layers.get(reach, 0) | 1 << layer
    masks: Masks = {}
    for mask in layers.values():
        for block in summary.needed_blocks((mask & -mask).bit_length() - 1):
            masks[block] = masks.get(block, 0) | mask
    return masks


def chain_masks(summary: CheckpointSummary) -> Masks:
    """Every page of every block, so that windowed layers can go back to any block."""
    return dict.fromkeys(summary.block_hashes, (1 << len(summary.reach)) - 1)


def masks_nbytes(namespace: Namespace, masks: Masks) -> int:
    """Bytes the pages take in packs, padding included."""
    of_spec: dict[PageSpec, int] = {}
    for layer, spec in enumerate(namespace.layers):
        of_spec[spec] = of_spec.get(spec, 0) | 1 << layer
    return sum(
        PackLayout.of(spec).stride * sum((mask & layers).bit_count() for mask in masks.values())
        for spec, layers in of_spec.items()
    )


class References:
    """What all sessions need but those in `without` (their folders' names).

    `keeps_history`: of windowed layers also the pages that no resume needs.  A session of `without`
    that gets another checkpoint counts again from the next `update` on.
    """

    def __init__(
        self, root: Folder, *, keeps_history: bool = True, without: Iterable[SessionUse] = ()
    ) -> None:
        self._root = root
        self._keeps_history = keeps_history
        self._without = {session.folder_name: session.sequence for session in without}
        self._seen: set[tuple[str, int]] = set()
        self._unchanged: dict[str, tuple[int, int]] = {}  # folders listed long after a change
        self._needs: dict[bytes, Masks] = {}
        self._newest: dict[str, SessionUse] = {}
        self.damaged: dict[str, Corrupt] = {}  # checkpoints that cannot be read, by path
        self.update()

    def needs(self, namespace_id: bytes) -> Masks:
        """The pages of a namespace that are needed; empty if no session is of it."""
        return self._needs.get(namespace_id, {})

    def has_namespace(self, namespace_id: bytes) -> bool:
        """Whether any session is of it, be it without pages."""
        return namespace_id in self._needs

    @property
    def sessions(self) -> list[SessionUse]:
        """Those that can be read, least recently used first."""
        return sorted(self._newest.values(), key=lambda session: session.used_ns)

    def num_sessions(self, namespace_id: bytes) -> int:
        return sum(session.namespace_id == namespace_id for session in self._newest.values())

    def update(self) -> None:
        """Adds what was published since.  What was removed stays counted: a page too many.

        Raises Incompatible for a checkpoint of a newer format: what it needs cannot be known.
        """
        with self._root.child(SESSIONS) as parent:
            for folder_name in parent.names():
                if is_session_folder(folder_name) and not self._is_unchanged(parent, folder_name):
                    try:
                        with parent.child(folder_name) as folder:
                            self._add_session(folder, folder_name)
                    except NotFound:
                        continue  # removed meanwhile

    def _is_unchanged(self, parent: Folder, folder_name: str) -> bool:
        """By the folder's time stamp: gc looks at all sessions while writers wait."""
        status = parent.status_of(folder_name)
        if status is None:
            return True
        stamp = (status.st_ino, status.st_mtime_ns)
        if self._unchanged.get(folder_name) == stamp:
            return True
        if time.time_ns() - status.st_mtime_ns > SETTLE_NS:
            self._unchanged[folder_name] = stamp
        return False

    def _add_session(self, folder: Folder, folder_name: str) -> None:
        listed = sequences(folder)
        ignored = self._without.get(folder_name)
        if ignored is not None:
            if not listed or listed[0] <= ignored:
                return
            del self._without[folder_name]
        for sequence in listed:
            if (folder_name, sequence) not in self._seen:
                self._add_checkpoint(folder, folder_name, sequence)

    def _add_checkpoint(self, folder: Folder, folder_name: str, sequence: int) -> None:
        name = checkpoint_name(sequence)
        try:
            summary, nbytes = read_summary(folder, sequence)
        except NotFound:
            return
        except Corrupt as error:
            self.damaged[folder.path_of(name)] = error
            return
        self._seen.add((folder_name, sequence))
        status = folder.status_of(name)
        needs = self._needs.setdefault(summary.namespace_id, {})
        masks = chain_masks(summary) if self._keeps_history else needed_masks(summary)
        for block, mask in masks.items():
            needs[block] = needs.get(block, 0) | mask
        known = self._newest.get(folder_name)
        nbytes += known.nbytes if known else 0
        newest = known if known and known.sequence > sequence else None
        self._newest[folder_name] = SessionUse(
            folder_name=folder_name,
            name=summary.session,
            sequence=newest.sequence if newest else sequence,
            namespace_id=newest.namespace_id if newest else summary.namespace_id,
            expires_ns=newest.expires_ns if newest else summary.expires_ns,
            used_ns=max(known.used_ns if known else 0, status.st_mtime_ns if status else 0),
            nbytes=nbytes,
        )
