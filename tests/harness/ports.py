"""Free loopback ports that stay ours while a server is down."""

import fcntl
import os
import random
import socket
import time
from pathlib import Path

LEASE = 600.0  # seconds


def free_port() -> int:
    """A port nobody listens on, below the ephemeral range: while a test has its server killed, no outgoing
    connection of another process can be given this port, so the restart gets it back.

    A broker needs seconds until it binds its port: nobody else is given the same one in the meantime. When each
    was given is in a file that all test runs of this user share, four bytes per port."""
    leases = Path(f"/tmp/queuesmith-ports-{os.getuid()}")  # whatever TMPDIR says
    with open(os.open(leases, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(200):
            port, now = random.SystemRandom().randrange(20_000, 32_000), time.time()
            given = int.from_bytes(os.pread(file.fileno(), 4, 4 * port), "big")
            if abs(now - given) > LEASE and _bindable(port):
                os.pwrite(file.fileno(), int(now).to_bytes(4, "big"), 4 * port)
                return port
    raise AssertionError("no free port between 20000 and 32000 on 127.0.0.1")


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
