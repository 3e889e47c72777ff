"""Find the network interface and the address of this node that other nodes reach."""

import contextlib
import fcntl
import os
import socket
import struct
import sys

_OUTSIDE = "192.0.2.1"  # an address for documentation (RFC 5737): its route leads to other machines


def interface_to(host: str, port: int) -> tuple[str | None, str]:
    """Return (interface name, own address) with which this node reaches the host; the name is None if it is
    not known.

    Nothing is sent: the kernel only chooses a route. Raises OSError if the host is unknown or has no route.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        local = probe.getsockname()[0]
    return _names().get(local), local


def outward() -> tuple[str | None, str] | None:
    """Return (interface name, own address) at which other nodes reach this one; None if it has only loopback.

    It is the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names (set by the platform or by
    process_group), else the one of the route to other machines. Without such a route it is the first one.
    """
    own = [(name, address) for address, name in _names().items() if "." in address and name != "lo"]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for wanted in filter(None, os.environ.get(variable, "").lstrip("=").split(",")):
            for name, address in own:
                if name.startswith(wanted):
                    return name, address
    with contextlib.suppress(OSError):
        return interface_to(_OUTSIDE, 1)
    return next(iter(own), None)


def _names() -> dict[str, str]:
    """Return address -> name of its interface. On systems other than Linux it is empty."""
    names = {}
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            names[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    SIOCGIFADDR = 0x8915  # netdevice(7): struct ifreq, 16 bytes of name and a sockaddr_in
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else []:
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("40s", name.encode()))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names
