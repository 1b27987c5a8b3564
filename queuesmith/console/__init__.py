"""A web console for BullMQ queues, whoever fills and works them: `queuesmith console`, or mounted in an ASGI service.

api.mount("/console", console(redis_url, token=admin_token))
"""

from .app import console
from .state import Console

__all__ = ["Console", "console"]
