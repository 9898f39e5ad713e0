"""Ports for servers that are killed and restarted on the same port."""

from __future__ import annotations

import random
import socket

# Below the range from which Linux takes the ports of outgoing connections (net.ipv4.ip_local_port_range, from 32,768):
# a connection of another process could otherwise take the port of a server that is down.
PORTS = range(20_000, 32_000)


def server_ports(count: int) -> list[int]:
    """Return different ports that were free on the loopback interface at the time of the call."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
    return ports
