"""Admin: breakers, limits, and requests that wait in the database for Redis."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path

from queuesmith.console.state import Admin
from studyhall.limits import admission, provider_breaker
from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.redaction import redact_text
from studyhall.patterns.degraded.pending import pending, release

from .problems import Problem
from .state import Api

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get("/breakers")
async def breakers(api: Api, _: Admin) -> dict[str, Any]:
    """Circuit breakers, rate limits, how full each queue may get, and what waits in the database for Redis."""
    app, settings = api.app, api.app.settings
    breaker = provider_breaker(settings, app.producer.redis)
    look = admission(settings, app.producer.redis)
    loads: dict[str, Any] = {}
    try:
        async with app.producer.bounded():
            for queue in app.jobs.queues:
                load = await look.load(queue)
                loads[queue] = {"depth": load.depth, **load.states, "oldest_seconds": round(load.oldest(), 1)}
    except QueueUnavailable:
        loads = {}
    remote = settings.provider != "local"
    waiting = await pending(app.store)
    return {
        "breakers": [asdict(await breaker.state())] if breaker else [],
        "provider": settings.provider,
        "rate_limits": {
            "user": {"per_second": settings.user_rate or (1.0 if remote else None), "burst": settings.user_burst},
            "all": {"per_second": settings.ai_rate or (5.0 if remote else None), "burst": settings.ai_burst},
        },
        "queues": loads,
        "depth_limit": settings.queue_depth or None,
        "age_limit": settings.queue_age or None,
        "pending": {
            "waiting": waiting.waiting,
            "oldest": waiting.oldest,
            "parked": {ident: redact_text(why) for ident, why in waiting.parked.items()},
        },
    }


@router.post("/pending/{job_id}/release")
async def release_pending(
    api: Api, _: Admin, job_id: Annotated[str, Path(pattern=r"^[^\x00-\x1f/]{1,200}$")]
) -> dict[str, bool]:
    """Try a parked request again."""
    if not await release(api.app.store, job_id):
        raise Problem(404, "not-found", "There is no such parked request.")
    return {"released": True}
