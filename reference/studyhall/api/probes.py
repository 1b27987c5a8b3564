"""For machines: is the process alive, can it work, how is it doing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from studyhall.patterns import health
from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.store import ping
from studyhall.patterns.dead_letter import counts
from studyhall.patterns.outbox import quarantine as outbox_upkeep

from .state import State

__all__ = ["router"]

router = APIRouter(tags=["probes"])


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """The process answers. Nothing else is asked: a restart would not bring Redis back."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "a part does not answer"}})
async def ready(api: State, response: Response) -> dict[str, Any]:
    """Redis and the database answer. 503 with the names of those that do not."""
    found = await health.problems(redis=api.app.producer.redis.ping, database=lambda: ping(api.app.store))
    if found:
        response.status_code = 503
        response.headers["Retry-After"] = "2"
    return {"status": "not ready" if found else "ready", "problems": dict(found)}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(api: State) -> Response:
    """Prometheus text: depth and age of every queue, the outbox, the dead letters."""
    lines: list[str] = []

    def gauge(name: str, about: str, values: dict[str, float]) -> None:
        lines.extend((f"# HELP studyhall_{name} {about}", f"# TYPE studyhall_{name} gauge"))
        lines.extend(f"studyhall_{name}{labels} {value}" for labels, value in values.items())

    try:
        async with api.app.producer.bounded():
            found = await health.measure(
                api.app.producer.redis, api.app.jobs.queues, dead_letters=counts(api.app.store)
            )
    except QueueUnavailable:
        gauge("redis_up", "Redis answers", {"": 0})
    else:
        gauge("redis_up", "Redis answers", {"": 1})
        states = ("waiting", "prioritized", "delayed", "overdue", "waiting_children", "active", "failed")
        depth = {
            f'{{queue="{queue.queue}",state="{state}"}}': float(getattr(queue, state))
            for queue in found.queues
            for state in states
        }
        gauge("queue_depth", "Jobs by state", depth)
        oldest = {f'{{queue="{queue.queue}"}}': queue.oldest for queue in found.queues}
        gauge("queue_oldest_age_seconds", "Age of the oldest job that should have started", oldest)
        gauge("dead_letters", "Dead letters not replayed yet", {"": float(found.dead_letters)})
    lag = await outbox_upkeep.lag(api.app.store)
    gauge("outbox_waiting", "Events not published yet", {"": float(lag.waiting)})
    gauge("outbox_oldest_seconds", "Age of the oldest of them", {"": lag.oldest})
    gauge("outbox_quarantined", "Events the event worker gave up on", {"": float(lag.quarantined)})
    return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")
