"""Which ports are free, and whose listener answers on one."""

from __future__ import annotations

import ipaddress
import random
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

_LISTEN = "0A"
_SPAN = 12_000
"""How many ports below the ephemeral range `free_port` chooses from."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `host:port` right now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier server in TIME_WAIT do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens.

    It lies below the system's ephemeral range where possible: a port inside it may be taken by any outgoing
    connection, a load client's among them, between now and the moment the server binds it.
    """
    low, high = _below_ephemeral()
    for port in random.sample(range(low, high), k=min(50, high - low)):
        if is_free(port, host):
            return port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _below_ephemeral() -> tuple[int, int]:
    try:
        start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        start = 32_768
    high = max(start, 10_001)
    return max(10_000, high - _SPAN), high


def listeners(port: int, host: str = "127.0.0.1") -> frozenset[int] | None:
    """Inodes of the sockets that listen on `host:port` (or on every address); None where the system cannot tell."""
    rows = _table()
    if not rows:
        return None
    wanted = _addresses(host)
    return frozenset(
        inode
        for ip, number, inode in _listening(rows)
        if number == port and (ip.is_unspecified or wanted is None or ip in wanted)
    )


def addresses(sockets: Collection[int]) -> list[str]:
    """`ip:port` of each of these sockets (by inode) that listens."""
    return sorted(f"{ip}:{port}" for ip, port, inode in _listening(_table()) if inode in sockets)


def listening() -> list[tuple[int, int]]:
    """(port, inode) of every socket that listens; empty where the system cannot tell."""
    return [(port, inode) for _, port, inode in _listening(_table())]


def _table() -> list[str]:
    rows: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows += Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
    return rows


def _listening(rows: list[str]) -> Iterator[tuple[_Address, int, int]]:
    for row in rows:
        local, state, inode = (row.split()[column] for column in (1, 3, 9))
        if state == _LISTEN:
            address, _, number = local.rpartition(":")
            yield _decode(address), int(number, 16), int(inode)


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _addresses(host: str) -> frozenset[_Address] | None:
    """What `host` resolves to; None (any address counts) when it is unspecified or cannot be resolved."""
    try:
        ips = {ipaddress.ip_address(str(entry[4][0])) for entry in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return None
    return None if any(ip.is_unspecified for ip in ips) else frozenset(ips)


def _decode(address: str) -> _Address:
    """An address of /proc/net/tcp*: 32-bit words in host byte order; a mapped IPv4 address comes back as IPv4."""
    words = bytes.fromhex(address)
    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    ip = ipaddress.ip_address(packed)
    return getattr(ip, "ipv4_mapped", None) or ip
