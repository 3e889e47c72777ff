"""A network of its own for processes, with a loopback that can be cut."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import psutil
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


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[list[tuple[str, ...]], str]]:
    """Yield the first words of commands that run on two nodes, and the address of the first one.

    A node has a network, a host name and processes of its own. cut() ends the link between them.
    """
    holders = []
    try:
        for name in ("node-a", "node-b"):
            command = f"hostname {name}; ip link set lo up; exec sleep infinity"
            words = ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", command]
            holders.append(subprocess.Popen(words))
        nodes = []
        for holder in holders:
            inner = _wait_for_child(holder)
            nodes.append(("nsenter", f"--target={inner}", "--net", "--uts", "--pid", "--mount"))
        first, second = (node[1].partition("=")[2] for node in nodes)
        pair = f"veth0 netns {first} type veth peer name veth0 netns {second}"
        subprocess.run(["ip", "link", "add", *pair.split()], check=True)
        for number, node in enumerate(nodes, 1):
            subprocess.run(
                [*node, "ip", "address", "add", f"10.11.12.{number}/24", "dev", "veth0"], check=True
            )
            subprocess.run([*node, "ip", "link", "set", "veth0", "up"], check=True)
        yield nodes, "10.11.12.1"
    finally:
        for holder in holders:
            for child in psutil.Process(holder.pid).children():
                child.kill()  # the first process of the node: all others end with it
            holder.kill()
            holder.wait()


def cut(node: tuple[str, ...]) -> None:
    """End the link of a node of two_nodes()."""
    subprocess.run([*node, "ip", "link", "set", "veth0", "down"], check=True)


def _wait_for_child(holder: subprocess.Popen) -> int:
    """Return the first process of a node, when it has named itself and waits."""
    while True:
        assert holder.poll() is None, "no namespace"
        for child in psutil.Process(holder.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.name() == "sleep":
                    return child.pid
        time.sleep(0.02)
