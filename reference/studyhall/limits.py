"""StudyHall's limits, from its settings: who may use the AI how often, and when uploads are refused."""

from redis.asyncio import Redis

from .patterns.backpressure import Admission, Limits
from .patterns.circuit_breaker import CircuitBreaker
from .patterns.core.execution import Step
from .patterns.rate_limit import limited, tenant_limit
from .settings import Settings

AI_JOBS = frozenset({"graph-generation", "quiz-creation", "connection-explanations"})
PLENTY = (1_000_000.0, 1_000_000)  # per user, when only the total is limited
USER_RATE, AI_RATE = 1.0, 5.0  # what a remote provider gets unless the settings say otherwise


def ai_limit(settings: Settings, redis: Redis) -> list[Step]:
    """Fair shares of the AI per user, and a limit for all of them. None for the local provider by default."""
    remote = settings.provider != "local"
    each = settings.user_rate or (USER_RATE if remote else None)
    total = settings.ai_rate or (AI_RATE if remote else None)
    if each is None and total is None:
        return []
    rate, burst = (each, settings.user_burst) if each else PLENTY
    together = (total, settings.ai_burst) if total else None
    return [limited(tenant_limit(redis, rate, burst, total=together, jobs=AI_JOBS, name="studyhall:ai"))]


def provider_breaker(settings: Settings, redis: Redis) -> CircuitBreaker | None:
    """Shared by all workers. The local provider needs none."""
    if settings.provider == "local":
        return None
    return CircuitBreaker(
        redis, f"studyhall:{settings.provider}", failures=settings.breaker_failures, cooldown=settings.breaker_seconds
    )


def admission(settings: Settings, redis: Redis) -> Admission:
    return Admission(redis, Limits(settings.queue_depth or None, settings.queue_age or None))
