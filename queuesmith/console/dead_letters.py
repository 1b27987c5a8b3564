"""Admin: dead letters. Look, replay one or many, purge."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator
from sqlalchemy import func, or_, select

from studyhall.patterns import dead_letter
from studyhall.patterns.core.errors import JobError
from studyhall.patterns.core.job import DAY
from studyhall.patterns.core.redaction import redact, redact_text
from studyhall.patterns.core.store import read

from .actions import started
from .state import Admin, Console, State

router = APIRouter(prefix="/admin/dead-letters", tags=["admin"])
DeadLetterId = Annotated[str, Path(pattern=r"^[^\x00-\x1f/]{1,300}$")]
BRIEF = (
    *("id", "queue", "job_id", "name", "cause", "reason"),
    *("attempts_made", "failed_at", "archived_at", "replayed_at"),
)


class ReplayMany(BaseModel):
    """Either `ids`, or all that match `queue` and `name`."""

    model_config = ConfigDict(extra="forbid")

    ids: Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=500)] = []
    queue: Annotated[str | None, Field(max_length=100)] = None
    name: Annotated[str | None, Field(max_length=100)] = None
    every: Annotated[bool, Field(description="must be set to replay without ids")] = False
    per_second: Annotated[float, Field(gt=0, le=1000)] = 10.0

    @model_validator(mode="after")
    def one_of_both(self) -> ReplayMany:
        if bool(self.ids) == self.every:
            raise ValueError("give ids, or say every: true")
        return self


class Purge(BaseModel):
    model_config = ConfigDict(extra="forbid")

    older_than_days: Annotated[float, Field(ge=0, le=36_500)]
    confirm: Annotated[Literal["purge"], Field(description="so that nothing is purged by accident")]


@router.get("")
async def dead_letters(
    console: State,
    _: Admin,
    queue: Annotated[str | None, Query(max_length=200)] = None,
    replayed: bool = False,
    q: Annotated[str, Query(max_length=200, description="a part of an id, a name or a reason")] = "",
    page: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    size: Annotated[int, Query(ge=1, le=200)] = 50,
) -> dict[str, Any]:
    """One page, newest first. `total`: how many match; `queues`: all that have dead letters."""
    columns = dead_letter.dead_letters.c
    same: list[Any] = [columns.replayed_at.is_not(None) if replayed else columns.replayed_at.is_(None)]
    if queue:
        same.append(columns.queue == queue)
    if word := q.strip():
        same.append(or_(*(columns[name].icontains(word, autoescape=True) for name in ("job_id", "name", "reason"))))
    rows = select(*(columns[name] for name in BRIEF)).where(*same)  # without the snapshots, which may be large
    newest = rows.order_by(columns.archived_at.desc(), columns.id).limit(size).offset(page * size)
    async with read(console.database()) as connection:
        total = await connection.scalar(select(func.count()).where(*same))
        queues = (await connection.scalars(select(columns.queue).distinct())).all()
        letters = (await connection.execute(newest)).all()
    return {"dead_letters": [_brief(row) for row in letters], "total": total, "queues": sorted(queues)}


@router.get("/{dead_letter_id}")
async def show(console: State, _: Admin, dead_letter_id: DeadLetterId) -> dict[str, Any]:
    """One dead letter: payload with secrets masked, stack traces, earlier deaths of the same job."""
    deaths = await dead_letter.show(console.database(), dead_letter_id)
    traces = json.loads(deaths[0].snapshot["fields"].get("stacktrace") or "[]")
    return {
        **_brief(deaths[0]),
        "correlation_id": deaths[0].correlation_id,
        "payload": redact(deaths[0].data),
        "attempts_failed": [
            {"attempt": number, "error": redact_text(str(trace))} for number, trace in enumerate(traces, 1)
        ],
        "earlier": [_brief(row) for row in deaths[1:]],
    }


@router.post("/{dead_letter_id}/replay")
async def replay(console: State, _: Admin, dead_letter_id: DeadLetterId) -> dict[str, str]:
    """Put the job back into its queue, under its own id. 409 if it is not dead any more."""
    async with console.bounded():
        done = await dead_letter.replay(console.database(), console.redis, dead_letter_id)
    return {"queue": done.queue, "job_id": done.job_id}


@router.post("/replay", status_code=202)
async def replay_many(console: State, _: Admin, wanted: ReplayMany) -> dict[str, str]:
    """Start replaying many, at most `per_second`. Those not done when this process stops stay dead letters."""
    return started(console, {"replayed": [], "refused": {}}, partial(_replay, console, wanted))


@router.post("/purge")
async def purge(console: State, _: Admin, wanted: Purge) -> dict[str, int]:
    """Delete dead letters older than this many days."""
    return {"purged": await dead_letter.purge(console.database(), wanted.older_than_days * DAY)}


async def _replay(console: Console, wanted: ReplayMany, state: dict[str, Any]) -> None:
    store, redis = console.database(), console.redis
    if wanted.every:
        done = await dead_letter.replay_many(
            store, redis, queue=wanted.queue, name=wanted.name, per_second=wanted.per_second
        )
        state["replayed"], state["refused"] = done.job_ids, done.refused
    start = time.monotonic()
    for number, ident in enumerate(dict.fromkeys(wanted.ids)):
        await asyncio.sleep(max(0.0, start + number / wanted.per_second - time.monotonic()))
        try:
            state["replayed"].append((await dead_letter.replay(store, redis, ident)).job_id)
        except JobError as error:
            state["refused"][ident] = redact_text(str(error))


def _brief(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in BRIEF} | {"reason": redact_text(row.reason)}
