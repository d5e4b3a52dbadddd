"""File system kinds from the systems' own listings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tqstore.store.mounts import (
    filesystem_kind,
    is_network,
    kind_in_mount_list,
    kind_in_mountinfo,
)

MOUNTINFO = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
23 22 0:40 / /home rw shared:5 - nfs4 server:/home rw
24 22 0:41 / /data\040disk rw - fuse.sshfs host: rw
25 22 8:2 / /home/me/local rw - xfs /dev/sdb rw
26 22 0:42 / /broken
"""
MOUNTS = """/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled, nobrowse)
//me@server/share on /Volumes/my (odd) share (smbfs, nodev, nosuid, mounted by me)
map auto_home on /System/Volumes/Data/home (autofs, automounted, nobrowse)
"""


@pytest.mark.parametrize(
    ("path", "device", "kind"),
    [
        ("/var/store", (8, 1), "ext4"),
        ("/home/you/store", (0, 40), "nfs4"),
        ("/home/me/local/store", (8, 2), "xfs"),
        ("/homeless", (8, 1), "ext4"),
        ("/data disk/store", (0, 41), "fuse.sshfs"),
        ("/home", (0, 40), "nfs4"),
        ("/home/you", (9, 9), "nfs4"),  # an unknown device: the deepest mount above
    ],
)
def test_linux(path: str, device: tuple[int, int], kind: str) -> None:
    assert kind_in_mountinfo(MOUNTINFO, path, os.makedev(*device)) == kind


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/Users/me", "apfs"),
        ("/Volumes/my (odd) share/store", "smbfs"),
        ("/System/Volumes/Data/x", "apfs"),
    ],
)
def test_macos(path: str, kind: str) -> None:
    assert kind_in_mount_list(MOUNTS, path) == kind


def test_network_kinds() -> None:
    local = ["ext4", "xfs", "btrfs", "apfs", "tmpfs", "overlay", "fuse.gocryptfs", "zfs"]
    assert not any(is_network(kind) for kind in local)
    far = ["nfs", "NFS4", "cifs", "smb3", "9p", "fuse.sshfs", "fuseblk.s3fs", "lustre"]
    assert all(is_network(kind) for kind in far)


def test_this_machine(tmp_path: Path) -> None:
    kind = filesystem_kind(tmp_path)
    assert kind is None or not is_network(kind)
