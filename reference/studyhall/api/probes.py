"""For machines: is the process alive, can it work, how is it doing."""

from typing import Any

from fastapi import APIRouter, Response

from studyhall.patterns import health
from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.store import ping
from studyhall.patterns.dead_letter import counts
from studyhall.patterns.health.exposition import MEDIA_TYPE, Sample, exposition, queue_samples
from studyhall.patterns.outbox import quarantine as outbox_upkeep
from studyhall.patterns.saga import store as saga_store

from .state import Api

router = APIRouter(tags=["probes"])


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """The process answers. Nothing else is checked: a restart would not bring Redis back."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "a part does not answer"}})
async def ready(api: Api, response: Response) -> dict[str, Any]:
    """Redis and the database answer. 503 with the names of those that do not."""
    problems = await health.problems(redis=api.app.producer.redis.ping, database=lambda: ping(api.app.store))
    if problems:
        response.status_code = 503
        response.headers["Retry-After"] = "2"
    return {"status": "not ready" if problems else "ready", "problems": dict(problems)}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(api: Api) -> Response:
    """Prometheus text: depth and age of every queue, the outbox, the dead letters, sagas that are stuck."""
    samples: list[Sample] = []
    try:
        async with api.app.producer.bounded():
            measured = await health.measure(
                api.app.producer.redis, api.app.jobs.queues, dead_letters=counts(api.app.store)
            )
    except QueueUnavailable:
        samples.append(("redis_up", {}, 0))
    else:
        samples += [("redis_up", {}, 1), *queue_samples(measured)]
    lag = await outbox_upkeep.lag(api.app.store)
    stuck = await saga_store.list_sagas(api.app.store, state="needs_repair", limit=1_000)
    samples += [
        ("outbox_waiting", {}, lag.waiting),
        ("outbox_oldest_seconds", {}, lag.oldest),
        ("outbox_quarantined", {}, lag.quarantined),
        ("sagas_stuck", {}, len(stuck)),
    ]
    return Response(exposition(samples), media_type=MEDIA_TYPE)
