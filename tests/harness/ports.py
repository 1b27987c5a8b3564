"""Free loopback ports that stay ours while a server is down."""

import random
import socket


def free_port() -> int:
    """A port nobody listens on, below the ephemeral range: while a test has its server killed, no outgoing
    connection of another process can be given this port, so the restart gets it back."""
    for _ in range(200):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port between 20000 and 32000 on 127.0.0.1")
