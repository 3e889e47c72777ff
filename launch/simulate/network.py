"""Give every simulated node a network namespace and an address, so that its link can be cut."""

import os
import re
import shutil
import subprocess

from common.ground.exits import BadInput

_NAME = "bootfile-{pid}-{part}"


class Network:
    """A bridge in its own namespace, and one namespace with one address for every node.

    The machine's own network is not changed. A context manager that removes the namespaces at its end. It
    needs root and `ip` (Debian: iproute2), else it raises BadInput.
    """

    def __init__(self, nodes: int):
        missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
        if missing:
            raise BadInput(f"--network-namespaces needs the commands {' and '.join(missing)}: not found")
        if os.geteuid() != 0:
            raise BadInput(f"--network-namespaces needs root; the user id is {os.geteuid()}")
        if nodes > 250:
            raise BadInput(f"--network-namespaces takes up to 250 nodes, not {nodes}")
        self.addresses = [f"10.77.0.{node + 1}" for node in range(nodes)]
        self._made: list[str] = []

    def __enter__(self) -> "Network":
        _remove_leftovers()
        try:
            self._switch = self._namespace("switch")
            _ip(f"-n {self._switch} link add br0 type bridge")
            _ip(f"-n {self._switch} link set br0 up")
            for node, address in enumerate(self.addresses):
                own = self._namespace(str(node))
                _ip(f"-n {self._switch} link add port{node} type veth peer name eth0 netns {own}")
                _ip(f"-n {self._switch} link set port{node} master br0 up")
                _ip(f"-n {own} address add {address}/24 dev eth0")
                _ip(f"-n {own} link set lo up")
                _ip(f"-n {own} link set eth0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            _run(f"ip netns delete {name}")
        self._made.clear()

    def command(self, node: int, command: list[str]) -> list[str]:
        """Return `command` for that node. It keeps its process id.

        The node's host name is its address. It therefore resolves to the node, like a pod's, not to
        127.0.1.1.
        """
        rename = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        own_name = ["unshare", "--uts", "sh", "-c", rename, self.addresses[node]]
        return ["ip", "netns", "exec", self._made[node + 1], *own_name, *command]

    def link(self, node: int, up: bool) -> None:
        """Set the node's link up or down at the switch: the node keeps its address."""
        _ip(f"-n {self._switch} link set port{node} {'up' if up else 'down'}")

    def _namespace(self, part: str) -> str:
        name = _NAME.format(pid=os.getpid(), part=part)
        _ip(f"netns add {name}")
        self._made.append(name)
        return name


def _ip(arguments: str) -> None:
    result = _run(f"ip {arguments}")
    if result.returncode:
        raise BadInput(f"--network-namespaces: `ip {arguments}`: {result.stderr.strip()}")


def _remove_leftovers() -> None:
    """Remove the namespaces of simulations that were killed."""
    listing = _run("ip netns list").stdout
    for name, pid in re.findall(r"^(" + _NAME.format(pid=r"(\d+)", part=r"\w+") + ")", listing, re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            _run(f"ip netns delete {name}")


def _run(command: str) -> subprocess.CompletedProcess:
    # In a session of its own: Ctrl-C must not reach `ip` during the clean-up.
    return subprocess.run(command.split(), capture_output=True, text=True, start_new_session=True)
