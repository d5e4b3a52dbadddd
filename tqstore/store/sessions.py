"""Sessions: named lines of immutable checkpoints, read and pruned.

Owns sessions/.  A checkpoint that cannot be read is passed over for the one before it, with a
warning; publishing one is `commit`'s.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import PurePath

from tqstore.errors import Corrupt, Incompatible, NotFound, TqStoreError
from tqstore.format.checkpoint import (
    Checkpoint,
    CheckpointSummary,
    decode_checkpoint,
    decode_summary,
    state_nbytes,
    summary_nbytes,
)
from tqstore.format.framing import FRAME_NBYTES
from tqstore.store.folder import Folder
from tqstore.store.names import (
    checkpoint_name,
    checkpoint_sequence,
    is_session_folder,
    session_folder,
)
from tqstore.store.records import SessionInfo
from tqstore.store.root import SESSIONS

KEPT_CHECKPOINTS = 2
_SUMMARY_READ_NBYTES = 1 << 16
_log = logging.getLogger("tqstore")


def sequences(folder: Folder) -> list[int]:
    """Sequence numbers of a session's checkpoints, newest first."""
    found = (checkpoint_sequence(name) for name in folder.names())
    return sorted((sequence for sequence in found if sequence is not None), reverse=True)


def read_checkpoint(folder: Folder, sequence: int) -> tuple[CheckpointSummary, Checkpoint]:
    """Corrupt for damage, or for a checkpoint that is another session's."""
    file = checkpoint_name(sequence)
    path = folder.path_of(file)
    with folder.reading(file) as (fd, file_nbytes):
        # What the two heads say is compared with the size first: nothing is read on their word.
        head = folder.read_range(file, fd, 0, FRAME_NBYTES)
        first = summary_nbytes(head, path)
        if first + FRAME_NBYTES > file_nbytes:
            raise Corrupt(path, f"cut short: {file_nbytes} bytes")
        head += folder.read_range(file, fd, len(head), first)
        second = state_nbytes(head[first:], path)
        if first + second != file_nbytes:
            raise Corrupt(path, f"has {file_nbytes} bytes, its records {first} and {second}")
        raw = head + folder.read_range(file, fd, len(head), file_nbytes - len(head))
    summary, checkpoint = decode_checkpoint(raw, path)
    _check_owner(summary, folder, sequence)
    return summary, checkpoint


def read_summary(folder: Folder, sequence: int) -> tuple[CheckpointSummary, int]:
    """The summary and the file's bytes; the state after it is not read."""
    file = checkpoint_name(sequence)
    path = folder.path_of(file)
    with folder.reading(file) as (fd, file_nbytes):
        raw = folder.read_range(file, fd, 0, min(_SUMMARY_READ_NBYTES, file_nbytes))
        nbytes = min(summary_nbytes(raw, path), file_nbytes)
        if nbytes > len(raw):
            raw += folder.read_range(file, fd, len(raw), nbytes - len(raw))
    summary = decode_summary(raw, path)
    _check_owner(summary, folder, sequence)
    return summary, file_nbytes


def folder_of(sessions: Folder, name: str) -> str:
    """Where session `name` is, or would be.

    One that cannot be read is also found by its folder's name, by which it is listed.
    """
    folder_name = session_folder(name)
    if sessions.status_of(folder_name) is None and is_session_folder(name):
        found = _info(sessions, name)
        if found is not None and found.problem is not None:
            return name
    return folder_name


def summaries(root: Folder, folder_name: str) -> list[CheckpointSummary]:
    """Of all checkpoints of a session's folder that can be read, newest first."""
    found = []
    try:
        with root.child(SESSIONS) as sessions, sessions.child(folder_name) as folder:
            for sequence in sequences(folder):
                with contextlib.suppress(Corrupt, Incompatible, NotFound):
                    found.append(read_summary(folder, sequence)[0])
    except NotFound:
        pass
    return found


def note_use(root: Folder, name: str) -> None:
    """Marks the session's newest checkpoint as used now; what cannot be noted is no error."""
    with (
        contextlib.suppress(OSError, TqStoreError),
        root.child(SESSIONS) as sessions,
        sessions.child(session_folder(name)) as folder,
    ):
        for sequence in sequences(folder)[:1]:
            folder.files.touch(folder.fd, checkpoint_name(sequence), time.time_ns())


def _check_owner(summary: CheckpointSummary, folder: Folder, sequence: int) -> None:
    path = folder.path_of(checkpoint_name(sequence))
    try:
        own_folder = session_folder(summary.session)
    except TqStoreError as error:
        raise Corrupt(path, f"its session's name is not valid: {error}") from error
    if summary.sequence != sequence or PurePath(folder.path).name != own_folder:
        raise Corrupt(path, f"is checkpoint {summary.sequence} of session {summary.session!r}")


def latest(root: Folder, name: str) -> Checkpoint:
    """The newest checkpoint that can be read.

    NotFound if there is none at all; the newest one's error if all are damaged.
    """
    first_error: TqStoreError | None = None
    try:
        with root.child(SESSIONS) as sessions, sessions.child(folder_of(sessions, name)) as folder:
            # Others may publish and prune meanwhile: list again until a listing holds still.
            while True:
                listed = sequences(folder)
                for sequence in listed:
                    try:
                        return read_checkpoint(folder, sequence)[1]
                    except NotFound:
                        break
                    except (Corrupt, Incompatible) as error:
                        is_oldest = sequence == listed[-1]
                        after = "there is none before" if is_oldest else "trying the one before"
                        _log.warning("session %s: checkpoint %s; %s", name, error, after)
                        first_error = first_error or error
                else:
                    break
                if sequences(folder) == listed:
                    break
    except NotFound:
        pass
    if first_error is not None:
        raise first_error
    raise _no_session("reading a session", name)


def list_sessions(root: Folder) -> list[SessionInfo]:
    """All sessions, newest first; one that cannot be read has a `problem` and its folder's name."""
    with root.child(SESSIONS) as sessions:
        found = [
            info
            for name in sorted(sessions.names())
            if is_session_folder(name) and (info := _info(sessions, name)) is not None
        ]
    return sorted(found, key=lambda info: -info.created_ns)


def _info(sessions: Folder, folder_name: str) -> SessionInfo | None:
    problem: str | None = None
    try:
        with sessions.child(folder_name) as folder:
            for sequence in sequences(folder):
                try:
                    summary, nbytes = read_summary(folder, sequence)
                except NotFound:
                    continue
                except TqStoreError as error:
                    problem = problem or str(error)
                else:
                    return _described(summary, nbytes)
    except NotFound:
        return None
    except TqStoreError as error:
        problem = str(error)
    return SessionInfo(name=folder_name, problem=problem) if problem else None


def _described(summary: CheckpointSummary, nbytes: int) -> SessionInfo:
    return SessionInfo(
        name=summary.session,
        sequence=summary.sequence,
        num_tokens=summary.num_tokens,
        num_blocks=len(summary.block_hashes),
        created_ns=summary.created_ns,
        expires_ns=summary.expires_ns,
        namespace_id=summary.namespace_id,
        nbytes=nbytes,
        metadata=summary.metadata,
        paging=summary.paging,
    )


def prune(folder: Folder) -> None:
    """Deletes all but the newest checkpoints.  Lost on a power cut: they are pruned next time."""
    for sequence in sequences(folder)[KEPT_CHECKPOINTS:]:
        folder.unlink(checkpoint_name(sequence))


def delete_checkpoints(folder: Folder) -> None:
    """All of them, the newest last: a power cut must not leave the session as it was before.

    Synced one by one, since unlinks that were not may reach the disk in any order.
    """
    for sequence in reversed(sequences(folder)):
        folder.unlink(checkpoint_name(sequence))
        folder.sync()


def check_there(root: Folder, names: Iterable[str]) -> None:
    """NotFound, with all that are missing, unless every session of `names` is there."""
    with root.child(SESSIONS) as sessions:
        missing = [n for n in names if sessions.status_of(folder_of(sessions, n)) is None]
    if missing:
        raise _no_session("removing sessions", *missing)


def _no_session(doing: str, *names: str) -> NotFound:
    return NotFound(
        f"there is no session {', '.join(map(repr, names))}",
        doing=doing,
        remedy="`tqstore ls` lists the sessions of a store",
    )


def remove(root: Folder, name: str) -> None:
    """Removes a session's checkpoints; its pages stay until gc finds them unused."""
    with root.child(SESSIONS) as sessions:
        folder_name = folder_of(sessions, name)
        try:
            folder = sessions.child(folder_name)
        except NotFound:
            raise _no_session("removing a session", name) from None
        with folder:
            delete_checkpoints(folder)
        sessions.rmdir(folder_name)
        sessions.sync()
