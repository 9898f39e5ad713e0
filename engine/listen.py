"""Listening socket, its URL, and loopback check. Imports no torch, so that a port in use is reported at once."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"


class PortError(Exception):
    """Address that cannot be bound; the message is one sentence for the user."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to ``host:port`` without listening yet; port 0 picks a free port.

    Raises:
        PortError: the address is in use or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only on sockets with an explicit protocol. Nagle adds 40 ms per response.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise PortError(
            f"{host}:{port} cannot be bound ({getattr(error, 'strerror', None) or error}): "
            "choose another port, or 0 for a free one."
        ) from error
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    """Return the URL of a server that listens on ``host``."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
