"""The sweep as a part of a worker process: `run_until_signalled([worker, sweeping([QUEUE], store, url)], grace=25)`."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.clock import Periodic
from ..core.connections import producer_client
from ..core.redaction import redact_text
from .archive import DeadLetter
from .sweeper import sweep

__all__ = ["log_it", "sweeping"]

log = logging.getLogger("dead_letter")


async def log_it(letter: DeadLetter) -> None:
    """The default alert: an error line without the payload."""
    reason = redact_text(letter.reason)
    log.error("dead letter %s: %s/%s: %s", letter.id, letter.queue, letter.job_id, reason)


def sweeping(
    queues: Sequence[str],
    store: AsyncEngine,
    redis_url: str,
    alert: Callable[[DeadLetter], Awaitable[object]] = log_it,
    *,
    every: float = 5.0,
) -> Periodic:
    """Keeps archiving what fails in these queues; `alert` tells a person."""
    redis = producer_client(redis_url)
    return Periodic("sweep of dead letters", lambda: sweep(queues, redis, store, alert), every=every)
