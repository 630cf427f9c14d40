"""Whether several machines can share a folder of runs: its locks must hold between processes and between nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from everfed.store.files import locked

MOUNTS = Path("/proc/self/mounts")
_TRY = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
_LOCAL = {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock"}  # options of NFS and Lustre
_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cephfs", "ceph", "9p", "cifs", "smb3", "fuse.glusterfs"}


class Mount(NamedTuple):
    """What a folder lies on."""

    kind: str
    options: frozenset[str]


def lock_report(folder: Path, mounts: str | None = None) -> str:
    """One line about the locks of a folder. mounts: the text of /proc/self/mounts."""
    probe = folder / f".everfed-lock-{os.getpid()}"
    try:
        with locked(probe):
            other = subprocess.run([sys.executable, "-c", _TRY, str(probe)], capture_output=True, check=False)
    except OSError as error:
        return f"no: {folder} takes no locks ({error.strerror}); runs cannot be kept there"
    finally:
        probe.unlink(missing_ok=True)
    if other.returncode == 0:
        return "no: a second process gets a lock that the first one holds; do not run several workers there"
    mount = mount_of(folder, mounts)
    if mount is None:
        return "yes, between processes; the file system is not known, so nothing is said about other nodes"
    if wrong := mount.options & _LOCAL:
        return (
            f"between processes of this node only: {mount.kind} is mounted with {min(wrong)}; ask for "
            f"{'the mount option flock' if mount.kind == 'lustre' else 'a mount without it'}"
        )
    if mount.kind not in _SHARED:
        return f"yes, between processes; {mount.kind} is a file system of this machine alone"
    if mount.kind == "lustre" and "flock" not in mount.options:
        return "between processes of this node only: lustre is mounted without flock; ask for this mount option"
    return f"yes, between processes, and {mount.kind} is mounted so that they hold between nodes"


def mount_of(folder: Path, mounts: str | None = None) -> Mount | None:
    """The file system that a folder lies on; None where the machine does not say."""
    if mounts is None:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="replace") if MOUNTS.is_file() else ""
    place, found = folder.resolve(), None
    longest = -1
    for line in mounts.splitlines():
        _, point, kind, options = line.split()[:4]
        point = point.replace("\\040", " ")
        if place.is_relative_to(point) and len(point) >= longest:  # a later mount hides an earlier one
            found, longest = Mount(kind, frozenset(options.split(","))), len(point)
    return found
