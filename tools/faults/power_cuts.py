"""Real power cuts: a loop-mounted ext4 that is shut down under a writer, without flushing.

Needs root and loop devices on Linux; `PowerCutsUnavailable` says why it cannot be done here.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.faults.kills import KillReport, hear, what_is_lost
from tools.faults.promises import Promises
from tools.faults.writer import Writer

DISK_NBYTES = 256 << 20
CUTS_A_DISK = 20
_FS_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_NOLOGFLUSH = struct.pack("<I", 2)  # as if the power went: not even the journal is written


class PowerCutsUnavailable(Exception):
    """This machine has no loop devices, or we are not root."""


def cut_power_often(folder: Path, cuts: int, seed: int = 0) -> KillReport:
    """`cuts` power cuts, each under a writer at a random moment, and a check after each.

    In the report `kills` counts cuts.  `folder` must be on a real disk with room for an image.
    """
    report, rng = KillReport(), random.Random(seed)
    promises = Promises()
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    while report.kills < cuts and not report.broken:
        if report.kills % CUTS_A_DISK == 0:
            _make_disk(image)
            promises = Promises()
        with _mounted(image, mount):
            report.acknowledged += _write_until_the_cut(mount, promises, rng)
        report.kills += 1
        with _mounted(image, mount):
            problem = what_is_lost(mount / "store", promises, is_thorough=True)
        if problem is not None:
            report.broken += (f"power cut {report.kills}: {problem}",)
    return report


def _write_until_the_cut(mount: Path, promises: Promises, rng: random.Random) -> int:
    writer = Writer(mount / "store", rng.getrandbits(32))
    time.sleep(rng.uniform(0.02, 0.4))
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, _NOLOGFLUSH)
    finally:
        os.close(fd)
        writer.stop()
    return hear(writer, promises)


def _make_disk(image: Path) -> None:
    image.unlink(missing_ok=True)
    with image.open("xb") as file:
        file.truncate(DISK_NBYTES)
    _run("mkfs.ext4", "-q", "-F", str(image))


@contextmanager
def _mounted(image: Path, mount: Path) -> Iterator[None]:
    _run("mount", "-o", "loop,data=ordered", str(image), str(mount))
    try:
        yield
    finally:
        _run("umount", str(mount))


def _run(*command: str) -> None:
    if os.getuid() != 0:
        raise PowerCutsUnavailable("mounting needs root")
    if shutil.which(command[0]) is None:
        raise PowerCutsUnavailable(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PowerCutsUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
