"""Find the network interface and the address of this node that other nodes reach."""

import ipaddress
import socket

from common.ground.exits import import_optional

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


def is_loopback(host: str) -> bool:
    """Return whether this is a loopback address as it is written, or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
