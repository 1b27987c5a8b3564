"""Admin: sagas and their repair, the outbox, breakers and limits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from studyhall.limits import admission, provider_breaker
from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.redaction import redact, redact_text
from studyhall.patterns.degraded.pending import pending, release
from studyhall.patterns.outbox import quarantine as outbox_upkeep
from studyhall.patterns.saga import repair as saga_repair
from studyhall.patterns.saga import store as saga_store

from .problems import Problem
from .state import Admin, State

__all__ = ["router"]

router = APIRouter(prefix="/admin", tags=["admin"])
SagaId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
SagaState = Literal["running", "compensating", "needs_repair", "completed", "compensated"]


class Repair(BaseModel):
    """`retry` the stuck step, `compensate` everything, or `mark` a step done or undone by hand."""

    model_config = ConfigDict(extra="forbid")

    action: Literal["retry", "compensate", "mark"]
    by: Annotated[str, Field(min_length=1, max_length=100)]
    note: Annotated[
        str, Field(min_length=1, max_length=1_000, description="what was found and done: the evidence")
    ]
    step: Annotated[str | None, Field(max_length=100)] = None
    outcome: Literal["done", "undone"] | None = None
    result: dict[str, Any] | None = None


class Events(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ids: Annotated[list[Annotated[str, Field(max_length=300)]], Field(min_length=1, max_length=500)]
    action: Literal["requeue", "discard"] = "requeue"
    why: Annotated[str, Field(max_length=500)] = ""


@router.get("/sagas")
async def sagas(
    api: State,
    _: Admin,
    state: SagaState | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> list[dict[str, Any]]:
    """Newest change first. `state=needs_repair` is the list that waits for a human."""
    return [_saga(one) for one in await saga_store.list_sagas(api.app.store, state=state, limit=limit)]


@router.get("/sagas/{saga_id}")
async def saga(api: State, _: Admin, saga_id: SagaId) -> dict[str, Any]:
    """One saga: steps and everything that ever happened to it."""
    found = await saga_store.load(api.app.store, saga_id)
    history = await saga_store.history(api.app.store, saga_id)
    return {
        **_saga(found),
        "data": redact(found.data),
        "steps": [redact(asdict(step)) for step in found.steps],
        "history": [redact(asdict(one)) for one in history],
    }


@router.post("/sagas/{saga_id}/repair")
async def repair(api: State, _: Admin, saga_id: SagaId, wanted: Repair) -> dict[str, Any]:
    """A human's hand for a saga that got stuck; recorded with name and note."""
    store, by, note = api.app.store, wanted.by, wanted.note
    if wanted.action == "retry":
        await saga_repair.retry(store, saga_id, by=by, note=note)
    elif wanted.action == "compensate":
        await saga_repair.compensate(store, saga_id, by=by, note=note)
    elif wanted.step and wanted.outcome:
        await saga_repair.mark(
            store, saga_id, wanted.step, wanted.outcome, by=by, note=note, result=wanted.result
        )
    else:
        raise Problem(422, "invalid", "`mark` needs a step and an outcome, done or undone.")
    return await saga(api, by, saga_id)


@router.get("/outbox")
async def outbox(api: State, _: Admin) -> dict[str, Any]:
    """How far the event worker is behind, and the events it gave up on."""
    stuck = await outbox_upkeep.quarantined(api.app.store, limit=100)
    return {
        **asdict(await outbox_upkeep.lag(api.app.store)),
        "events": [{**asdict(one), "reason": redact_text(one.reason or "")} for one in stuck],
    }


@router.post("/outbox/quarantine")
async def release_events(api: State, _: Admin, wanted: Events) -> dict[str, int]:
    """Publish quarantined events again, or give them up so that what waits behind them goes on."""
    if wanted.action == "requeue":
        return {"requeued": await outbox_upkeep.requeue(api.app.store, wanted.ids)}
    if not wanted.why.strip():
        raise Problem(422, "invalid", "`discard` needs a why; it is kept with the event.")
    return {"discarded": await outbox_upkeep.discard(api.app.store, wanted.ids, wanted.why)}


@router.get("/breakers")
async def breakers(api: State, _: Admin) -> dict[str, Any]:
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
            "user": {
                "per_second": settings.user_rate or (1.0 if remote else None),
                "burst": settings.user_burst,
            },
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
    api: State, _: Admin, job_id: Annotated[str, Path(pattern=r"^[^\x00-\x1f/]{1,200}$")]
) -> dict[str, bool]:
    """Try a parked request again."""
    if not await release(api.app.store, job_id):
        raise Problem(404, "not-found", "There is no such parked request.")
    return {"released": True}


def _saga(one: saga_store.SagaRow) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "state": one.state,
        "backward": one.backward,
        "error": redact_text(one.error) if one.error else None,
        "created_at": one.created_at,
        "updated_at": one.updated_at,
    }
