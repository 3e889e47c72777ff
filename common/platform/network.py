"""Find the network interface that reaches other nodes."""

import ipaddress
import socket

from bootfile.ground.errors import import_optional

OUTSIDE = "192.0.2.1"  # an address for documentation (RFC 5737): its route leads to other machines


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
