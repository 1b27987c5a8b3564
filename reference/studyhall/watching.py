"""StudyHall's health: what is measured, and the limits. For the scheduled check and `studyhall health`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .patterns.dead_letter import counts
from .patterns.health import Health, measure
from .patterns.health.alerts import Rule
from .patterns.outbox.quarantine import lag

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from sqlalchemy.ext.asyncio import AsyncEngine

RULES = (
    Rule("*.oldest", raise_at=300, clear_at=60, because="jobs wait too long: add workers, or look for one that hangs"),
    Rule("*.unattended", raise_at=1, clear_at=0.5, because="jobs are there and no worker is: start `studyhall worker`"),
    Rule("*.backlog", raise_at=10_000, clear_at=5_000, because="more comes in than is done"),
    Rule("*.failure_rate", raise_at=0.2, clear_at=0.05, because="every fifth job fails: see studyhall dlq list"),
    Rule("dead_letters", raise_at=100, clear_at=20, because="failed jobs wait for a person: see studyhall dlq list"),
    Rule(
        "redis.memory",
        raise_at=0.8,
        clear_at=0.7,
        because="Redis is nearly full, and then takes no job: give it memory, or find what fills it",
    ),
    Rule(
        "outbox.oldest",
        raise_at=60,
        clear_at=10,
        because="events are not published: does `studyhall event-worker` run?",
    ),
)


async def signals(
    redis: "Redis", store: "AsyncEngine", queues: Sequence[str], *, prefix: str = "bull"
) -> tuple[Health, dict[str, float]]:
    """The queues in detail, and every number that a rule may look at."""
    measured = await measure(redis, queues, dead_letters=counts(store), prefix=prefix)
    return measured, {**measured.signals(), "outbox.oldest": (await lag(store)).oldest}
