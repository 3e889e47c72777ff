"""Find the network interface that reaches other nodes."""

import ipaddress
import socket

from bootfile.ground.errors import import_optional

OUTSIDE = "192.0.2.1"  # an address for documentation (RFC 5737): its route leads to other machines


def interface_to(host: str, port: int) -> tuple[str | None, str]:
    """Return (interface name, own address) with which this node reaches the host; the name is None if it is
    not known. Nothing is sent: the kernel only chooses a route. Raises OSError if the host is unknown or has
    no route."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connect() of UDP sends nothing
        probe.connect(address)
        local = probe.getsockname()[0]
    psutil = import_optional("psutil", "the choice of the network interface needs psutil")
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.address.partition("%")[0] == local:  # an IPv6 address ends with %INTERFACE
                return name, local
    return None, local


def explain_interfaces(variable: str, value: str) -> str:
    """Return the error of a variable that names no interface of this node; "" if it names one.
    GLOO_SOCKET_IFNAME has whole names, and gloo needs all of them. NCCL_SOCKET_IFNAME has beginnings of
    names, whole names after "=", or after "^" those that NCCL must not use; it needs one interface."""
    names = [name for _, name in socket.if_nameindex()]
    words = {word.partition(":")[0] for word in value.lstrip("^=").split(",") if word}
    if variable.startswith("GLOO"):
        is_valid = words <= {*names}
    else:
        are_whole = value.lstrip("^").startswith("=")
        named = words & {*names}
        if not are_whole:
            named = {name for name in names if name.startswith(tuple(words))}
        usable = {*names} - named if value.startswith("^") else named
        is_valid = not words or bool(usable)
    return "" if is_valid else f"{variable}={value}: no such interface; this node has {', '.join(names)}"


def is_loopback(host: str) -> bool:
    """Return whether this is a loopback address as it is written, or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it is not resolved here, which may take seconds
        return host == "localhost"
