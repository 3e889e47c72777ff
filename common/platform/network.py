"""Find the network interface that reaches other nodes, and check that this node reaches the master."""

import ipaddress
import os
import socket
import threading

from common.ground.exits import import_optional
from common.platform.topology import Topology

OUTSIDE = "192.0.2.1"  # an address for documentation (RFC 5737): its route leads to other machines
_RESOLVE, _REACH = 3.0, 1.0  # seconds for the name of the master, and for a connection to it
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


def is_loopback(host: str) -> bool:
    """Return whether this is a loopback address as it is written, or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check(topology: Topology) -> tuple[_Facts, _Facts]:
    """Return the findings `master` and `interface`: the route to the master, and this node's interface to it,
    within about four seconds. topology: the place of this process in the job."""
    if not topology.master_host or (topology.nodes == 1 and topology.level == "node"):  # it uses loopback
        return ("none needed: one node", [], []), ("loopback: one node", [], [])
    where = f"{topology.master_host}:{topology.master_port}"
    address, why = _resolve(topology.master_host, topology.master_port)
    if address is None:
        unknown = where, [f"the master's host name {why}"], []
        return unknown, ("not known without the address of the master", [], [])
    master_findings = f"{where} is {address[0]}", [], _try_port(topology, address)
    try:
        name, local = interface_to(*address[:2])
    except OSError as error:
        return master_findings, ("none", [f"no route to {address[0]}: {error.strerror}"], [])
    warnings = []
    if topology.nodes > 1 and is_loopback(local):
        warnings.append(f"{topology.nodes} nodes, but {address[0]} is an address within one machine")
    return master_findings, (f"{name} with {local}", [], warnings)


def _resolve(host: str, port: int | None) -> tuple[tuple | None, str]:
    """Return (first socket address, ""), or (None, reason). A name server that does not answer would block
    for minutes, so a thread asks it."""
    answers: list[tuple[tuple | None, str]] = []

    def ask() -> None:
        try:
            answers.append((socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4], ""))
        except (OSError, UnicodeError) as error:
            answers.append((None, f"does not resolve ({getattr(error, 'strerror', None) or error})"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_RESOLVE)
    return answers[0] if answers else (None, f"does not resolve (no answer within {_RESOLVE:.0f} s)")


def _try_port(topology: Topology, address: tuple) -> list[str]:
    """Return a warning if the master cannot listen, or another node cannot connect to it."""
    # If a launcher started the processes, its store listens already on the port.
    port = topology.master_port if topology.level == "node" else 0
    try:
        if topology.node_rank == 0:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            socket.create_server((address[0], port), family=family).close()
        else:
            socket.create_connection(address[:2], _REACH).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        first = f"node 0 cannot listen on port {port} of {address[0]}, its address"
        return [f"{first if topology.node_rank == 0 else 'not started yet, or a firewall'}: {reason}"]
    return []
