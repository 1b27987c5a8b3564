"""What the patterns keep in the store: sagas and their repair, the outbox."""

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from studyhall.patterns.core.redaction import redact, redact_text
from studyhall.patterns.outbox import quarantine as outbox_upkeep
from studyhall.patterns.saga import repair as saga_repair
from studyhall.patterns.saga import store as saga_store

from .problems import Problem
from .state import Admin, State

router = APIRouter(prefix="/admin", tags=["admin"])
SagaId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
SagaState = Literal["running", "compensating", "needs_repair", "completed", "compensated"]


class Repair(BaseModel):
    """`retry` the stuck step, `compensate` everything, or `mark` a step done or undone by hand."""

    model_config = ConfigDict(extra="forbid")

    action: Literal["retry", "compensate", "mark"]
    by: Annotated[str, Field(min_length=1, max_length=100)]
    note: Annotated[str, Field(min_length=1, max_length=1_000, description="what was found and done: the evidence")]
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
    console: State, _: Admin, state: SagaState | None = None, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> list[dict[str, Any]]:
    """Newest change first. `state=needs_repair` is the list that waits for a human."""
    return [_saga(row) for row in await saga_store.list_sagas(console.database(), state=state, limit=limit)]


@router.get("/sagas/{saga_id}")
async def saga(console: State, _: Admin, saga_id: SagaId) -> dict[str, Any]:
    """One saga: steps and everything that ever happened to it."""
    row = await saga_store.load(console.database(), saga_id)
    history = await saga_store.history(console.database(), saga_id)
    return {
        **_saga(row),
        "data": redact(row.data),
        "steps": [redact(asdict(step)) for step in row.steps],
        "history": [redact(asdict(entry)) for entry in history],
    }


@router.post("/sagas/{saga_id}/repair")
async def repair(console: State, _: Admin, saga_id: SagaId, wanted: Repair) -> dict[str, Any]:
    """Manual repair of a stuck saga; recorded with name and note."""
    store, by, note = console.database(), wanted.by, wanted.note
    if wanted.action == "retry":
        await saga_repair.retry(store, saga_id, by=by, note=note)
    elif wanted.action == "compensate":
        await saga_repair.compensate(store, saga_id, by=by, note=note)
    elif wanted.step and wanted.outcome:
        await saga_repair.mark(store, saga_id, wanted.step, wanted.outcome, by=by, note=note, result=wanted.result)
    else:
        raise Problem(422, "invalid", "`mark` needs a step and an outcome, done or undone.")
    return await saga(console, by, saga_id)


@router.get("/outbox")
async def outbox(console: State, _: Admin) -> dict[str, Any]:
    """How far the event worker is behind, and the events it gave up on."""
    stuck = await outbox_upkeep.quarantined(console.database(), limit=100)
    return {
        **asdict(await outbox_upkeep.lag(console.database())),
        "events": [{**asdict(event), "reason": redact_text(event.reason or "")} for event in stuck],
    }


@router.post("/outbox/quarantine")
async def release_events(console: State, _: Admin, wanted: Events) -> dict[str, int]:
    """Publish quarantined events again, or discard them so that those waiting behind them go on."""
    if wanted.action == "requeue":
        return {"requeued": await outbox_upkeep.requeue(console.database(), wanted.ids)}
    if not wanted.why.strip():
        raise Problem(422, "invalid", "`discard` needs a why; it is kept with the event.")
    return {"discarded": await outbox_upkeep.discard(console.database(), wanted.ids, wanted.why)}


def _saga(row: saga_store.SagaRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "state": row.state,
        "backward": row.backward,
        "error": redact_text(row.error) if row.error else None,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    }
