"""The socket that the server listens on, bound before anything slow happens."""

from __future__ import annotations

import errno
import socket

from engine.errors import PortUnavailable


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the model is ready. Port 0 picks a free one.

    Raises:
        PortUnavailable: the port is taken, or the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise PortUnavailable(f"host: '{host}' is not an address ({error})") from error
    listener = socket.socket(family, kind, protocol)
    # Lets a restart take over a port whose old connections are still in TIME_WAIT; a live listener is still refused.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise unavailable(host, port, error) from error
    return listener


def unavailable(host: str, port: int, error: OSError) -> PortUnavailable:
    """The message for a failed bind or listen."""
    if error.errno == errno.EADDRINUSE:
        return PortUnavailable(f"port {port} on {host} is in use by another process; choose another (0 picks one)")
    return PortUnavailable(f"cannot listen on {host} port {port}: {error.strerror or error}")


def url_of(listener: socket.socket) -> str:
    """`http://…` where the server can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
