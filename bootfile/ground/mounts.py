"""Find the mount that holds a folder, and whether its locks end at this node, as they do on many mounts."""

import contextlib
import os
import re

LEASE = ".lease"  # in an output folder: the records of lease.py, which such a mount needs
_MOUNTS = "/proc/self/mountinfo"
_SHARES_LOCKS = re.compile(r"fuse\.(juicefs|ceph.*|gluster.*|beegfs|moosefs|mfs.*|.*overlayfs)")
_LOCAL_OPTIONS = {  # type of a mount -> pattern of the options with which its locks are local
    "nfs": "nolock|local_lock=(all|posix)",
    "nfs4": "nolock|local_lock=(all|posix)",
    "lustre": "localflock",
    "cifs": "nobrl",
    "smb3": "nobrl",
    "9p": ".*",
    "virtiofs": ".*",
    "fuse": ".*",
}


def find_local_locks(path: str) -> str:
    """Return the type of the mount that holds a path if its locks may end at this node, else "". A job calls
    it when it holds its output folder, on rank 0."""
    _, kind, options = _find(path)
    # `fuse.s3fs` is of the type fuse; those whose locks reach other nodes are named one by one
    expected = _LOCAL_OPTIONS.get(kind.partition(".")[0])
    if expected is None or _SHARES_LOCKS.fullmatch(kind):
        return ""
    return kind if re.search(rf"(^|,)({expected})(,|$)", options) else ""


def describe_mount(path: str) -> str:
    """Return the mount that holds a path, "nfs4 at /mnt/runs"; "" if the system does not tell."""
    point, kind, _ = _find(path)
    return f"{kind} at {point}" if kind else ""


def _find(path: str) -> tuple[str, str, str]:
    """Return (mount point, type, options) of the mount that holds a path; texts are "" if not known."""
    found = "", "", ""
    with contextlib.suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, device = line.partition(" - ")
            point = unescape(mount.split()[4])
            # the innermost mount holds the path
            if os.path.commonpath([point, path]) == point and len(point) >= len(found[0]):
                kind, _, options = (*device.split(), "", "")[:3]
                found = point, kind, f"{mount.split()[5]},{options}"
    return found


def unescape(word: str) -> str:
    """Return a word of /proc/self/mountinfo without its escapes: a space is written as \\040."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), word)
