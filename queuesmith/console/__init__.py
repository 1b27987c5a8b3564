"""A web console for any BullMQ queues: `queuesmith console`, or mounted in an ASGI service.

api.mount("/console", console(redis_url, token=admin_token))
"""

from .app import console
from .state import Console

__all__ = ["Console", "console"]
