"""Free loopback ports that stay ours while a server is down."""

from queuesmith.prove.processes import free_port

__all__ = ["free_port"]
