"""Which network interface leads to another machine.

gloo listens at the address that the machine's own name stands for. On many machines that is a
loopback address (Debian writes ``127.0.1.1 NAME`` into /etc/hosts), where no other one finds it.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915


def interface_towards(host: str) -> str | None:
    """Name of the interface from which this machine reaches ``host``, or is reached as ``host``;
    None where that can't be told (not on Linux, IPv6, several that it could be)."""
    if sys.platform != "linux":
        return None
    addresses = _addresses()
    try:
        found = socket.getaddrinfo(host, 9, family=socket.AF_INET, type=socket.SOCK_DGRAM)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # chooses a route; sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    if own.startswith("127.") and host != "localhost" and not host.startswith("127."):
        # this machine's own name, which stands for a loopback address only here
        others = [name for name, address in addresses.items() if not address.startswith("127.")]
        return others[0] if len(others) == 1 else None
    if own.startswith("127."):
        own = "127.0.0.1"
    return next((name for name, address in addresses.items() if address == own), None)


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def let_gloo_use(host: str) -> None:
    """Have the processes that this one starts meet at the interface that leads to ``host``, unless
    ``GLOO_SOCKET_IFNAME`` names one already."""
    name = interface_towards(host)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
