"""A network of its own for processes, with a loopback that can be cut."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

LINK = ("ip", "link", "set", "lo")
needs_namespace = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"
)


@contextlib.contextmanager
def namespace() -> Iterator[tuple[str, ...]]:
    """Yield the first words of a command that runs in a network namespace of its own."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    inside = ("nsenter", f"--target={holder.pid}", "--net")
    try:
        while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert holder.poll() is None, "no namespace"
        subprocess.run([*inside, *LINK, "up"], check=True)
        yield inside
    finally:
        holder.kill()
        holder.wait()
