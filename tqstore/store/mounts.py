"""What kind of file system a path is on: network ones are refused.

Their locks and fsync do not promise what the commit protocol needs.  A kind that cannot be found
out is let through.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tqstore.errors import BackendFailed

# fmt: off
NETWORK_KINDS = frozenset({
    "9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs",
    "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "smb2", "smb3", "smbfs", "webdav",
})
# fmt: on
# fmt: off
NETWORK_FUSE = frozenset({
    "sshfs", "s3fs", "rclone", "gcsfuse", "goofys", "davfs", "davfs2", "glusterfs", "cephfs",
    "ceph", "curlftpfs", "juicefs", "smbnetfs", "mount-s3", "blobfuse", "blobfuse2", "moosefs",
})
# fmt: on


def is_network(kind: str) -> bool:
    kind = kind.lower()
    family, _, program = kind.partition(".")
    return kind in NETWORK_KINDS or (family.startswith("fuse") and program in NETWORK_FUSE)


def refuse_network(path: Path) -> None:
    """BackendFailed if `path` (or the nearest existing folder above it) is on a network mount."""
    while not path.exists() and path != path.parent:
        path = path.parent
    kind = filesystem_kind(path.resolve())
    if kind is not None and is_network(kind):
        raise BackendFailed(
            f"{path} is on a network file system ({kind})",
            doing="opening a store",
            remedy="Use a folder on a local disk: set TQSTORE_HOME or give a path",
        )


def filesystem_kind(path: Path) -> str | None:
    """The type of the file system `path` is on, or None where the system doesn't tell."""
    try:
        if sys.platform == "darwin":
            mounts = subprocess.run(
                ["/sbin/mount"], capture_output=True, text=True, check=True, timeout=10
            ).stdout
            return kind_in_mount_list(mounts, str(path))
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return kind_in_mountinfo(file.read(), str(path), os.stat(path).st_dev)
    except (OSError, subprocess.SubprocessError):
        return None


def kind_in_mountinfo(text: str, path: str, device: int) -> str | None:
    """Linux: of the mounts of `device` above `path` the deepest and latest."""
    best: tuple[int, str] | None = None
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        # Spaces and the like in mount points are written as octal escapes.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        same_device = fields[2] == f"{os.major(device)}:{os.minor(device)}"
        depth = len(point) + (1 << 16 if same_device else 0)
        if _is_above(point, path) and (best is None or depth >= best[0]):
            best = (depth, right.split(" ")[0])
    return best[1] if best else None


def kind_in_mount_list(text: str, path: str) -> str | None:
    """macOS: lines `device on /point (kind, options...)`; the deepest above `path`."""
    best: tuple[int, str] | None = None
    for line in text.splitlines():
        before, separator, options = line.rpartition(" (")
        point = before.partition(" on ")[2]
        if separator and _is_above(point, path) and (best is None or len(point) >= best[0]):
            best = (len(point), options.split(",")[0].rstrip(")").strip())
    return best[1] if best else None


def _is_above(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")
