"""Find the network interface that reaches other nodes."""

import ipaddress
import socket

from common.ground.exits import import_optional
from common.platform.topology import Topology

OUTSIDE = "192.0.2.1"  # an address for documentation (RFC 5737): its route leads to other machines
_Facts = tuple[str, list[str], list[str]]  # facts, errors, warnings


def interface_to(host: str, port: int) -> tuple[str | None, str]:
    """Return (interface name, own address) with which this node reaches the host; the name is None if it is
    not known.

    Nothing is sent: the kernel only chooses a route. Raises OSError if the host is unknown or has no route.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        local = probe.getsockname()[0]
    psutil = import_optional("psutil", "the choice of the network interface needs psutil")
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == local for each in addresses):
            return name, local
    return None, local


def missing_interface(variable: str, value: str) -> str:
    """Return an error if no interface of this node fits GLOO_SOCKET_IFNAME (names, with commas between them)
    or NCCL_SOCKET_IFNAME (beginnings of names; = before whole names, ^ before those to exclude); else ""."""
    names = [name for _, name in socket.if_nameindex()]
    given = [each.partition(":")[0] for each in value.lstrip("^=").split(",") if each]
    if variable.startswith("GLOO"):
        is_missing = not {*given} <= {*names}
    else:  # nccl uses those that exist
        same = str.__eq__ if value.lstrip("^").startswith("=") else str.startswith
        fits = [any(same(name, each) for each in given) for name in names]
        is_missing = bool(given) and all(each == value.startswith("^") for each in fits)
    return f"{variable}={value}: no such interface; this node has {', '.join(names)}" if is_missing else ""


def is_loopback(host: str) -> bool:
    """Return whether this is a loopback address as it is written, or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check(topology: Topology) -> tuple[_Facts, _Facts]:
    """Return the findings `master` and `interface`: the address of the master, and this node's interface to
    it. topology: the place of this process in the job."""
    host, port = topology.master_host, topology.master_port
    if not host or (topology.nodes == 1 and topology.level == "node"):  # it uses loopback
        return ("none needed: one node", [], []), ("loopback: one node", [], [])
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        unknown = f"{host}:{port}", [f"the master's host name does not resolve ({reason})"], []
        return unknown, ("not known without the address of the master", [], [])
    master = f"{host}:{port} is {address[0]}", [], []
    try:
        name, local = interface_to(str(address[0]), port or 1)
    except OSError as error:
        return master, ("none", [f"no route to {address[0]}: {error.strerror}"], [])
    is_alone = topology.nodes > 1 and is_loopback(local)
    warnings = [f"{topology.nodes} nodes, but {address[0]} is an address within one machine"] * is_alone
    return master, (f"{name} with {local}", [], warnings)
