"""The port: taken before anything heavy is imported, so that a taken one is known at once."""

from __future__ import annotations

import ipaddress
import socket


class PortError(Exception):
    """The address cannot be listened on; the message is one sentence for the user."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to ``host:port`` that does not listen yet; port 0 takes a free one.

    Raises:
        PortError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named: it costs 40 ms per response.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise PortError(
            f"{host}:{port} cannot be listened on ({getattr(error, 'strerror', None) or error}): "
            "choose another port, or 0 for a free one."
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
