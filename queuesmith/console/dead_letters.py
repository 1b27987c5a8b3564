"""Admin: dead letters. Look, replay one or many, purge."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator
from sqlalchemy import func, select

from studyhall.patterns import dead_letter
from studyhall.patterns.core.errors import JobError
from studyhall.patterns.core.job import DAY
from studyhall.patterns.core.redaction import redact, redact_text
from studyhall.patterns.core.store import read

from .actions import started
from .problems import Problem
from .state import Admin, Console, State

router = APIRouter(prefix="/admin/dead-letters", tags=["admin"])
DeadLetterId = Annotated[str, Path(pattern=r"^[^\x00-\x1f/]{1,300}$")]


class ReplayMany(BaseModel):
    """Either `ids`, or all that match `queue` and `name`."""

    model_config = ConfigDict(extra="forbid")

    ids: Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=500)] = []
    queue: Annotated[str | None, Field(max_length=100)] = None
    name: Annotated[str | None, Field(max_length=100)] = None
    every: Annotated[bool, Field(description="must be said to replay without ids")] = False
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
    queue: Annotated[str | None, Query(max_length=100)] = None,
    replayed: bool = False,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[str | None, Query(max_length=300, description="last id of the page before")] = None,
) -> dict[str, Any]:
    """Newest first. `next` is the `after` of the next page, `total` how many there are."""
    table = dead_letter.dead_letters
    same: list[Any] = [table.c.replayed_at.is_not(None) if replayed else table.c.replayed_at.is_(None)]
    if queue:
        same.append(table.c.queue == queue)
    async with read(console.database()) as connection:
        total = (await connection.execute(select(func.count()).select_from(table).where(*same))).scalar_one()
    found = await dead_letter.list_dead_letters(
        console.database(), queue=queue, replayed=replayed, limit=limit, after=after
    )
    return {
        "dead_letters": [_brief(one) for one in found],
        "next": found[-1].id if len(found) == limit else None,
        "total": total,
    }


@router.get("/replays/{replay_id}")
async def replay_state(
    console: State, _: Admin, replay_id: Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
) -> dict[str, Any]:
    """How far a replay of many is. Known to the process that runs it, until it stops."""
    if replay_id not in console.running:
        raise Problem(404, "not-found", "There is no such replay in this process.")
    return console.running[replay_id]


@router.get("/{dead_letter_id}")
async def show(console: State, _: Admin, dead_letter_id: DeadLetterId) -> dict[str, Any]:
    """One dead letter: payload with secrets masked, stack traces, earlier deaths of the same job."""
    found = await dead_letter.show(console.database(), dead_letter_id)
    traces = json.loads(found[0].snapshot["fields"].get("stacktrace") or "[]")
    return {
        **_brief(found[0]),
        "correlation_id": found[0].correlation_id,
        "payload": redact(found[0].data),
        "attempts_failed": [
            {"attempt": number, "error": redact_text(str(trace))} for number, trace in enumerate(traces, 1)
        ],
        "earlier": [_brief(one) for one in found[1:]],
    }


@router.post("/{dead_letter_id}/replay")
async def replay(console: State, _: Admin, dead_letter_id: DeadLetterId) -> dict[str, str]:
    """Put the job back into its queue, under its own id. 409 if it is not dead any more."""
    async with console.bounded():
        done = await dead_letter.replay(console.database(), console.redis, dead_letter_id)
    return {"queue": done.queue, "job_id": done.job_id}


@router.post("/replay", status_code=202)
async def replay_many(console: State, _: Admin, wanted: ReplayMany) -> dict[str, str]:
    """Start replaying many, at most `per_second`. What is not done when this process stops stays a dead letter."""
    state = started(console, {"replayed": [], "refused": {}})
    console.tasks.start(_replay(console, wanted, state), name=f"replay {state['id']}")
    return {"id": state["id"], "href": f"/admin/dead-letters/replays/{state['id']}"}


@router.post("/purge")
async def purge(console: State, _: Admin, wanted: Purge) -> dict[str, int]:
    """Forget dead letters older than so many days, for good."""
    return {"purged": await dead_letter.purge(console.database(), wanted.older_than_days * DAY)}


async def _replay(console: Console, wanted: ReplayMany, state: dict[str, Any]) -> None:
    store, redis = console.database(), console.redis
    try:
        if wanted.every:
            done = await dead_letter.replay_many(
                store, redis, queue=wanted.queue, name=wanted.name, per_second=wanted.per_second
            )
            state["replayed"], state["refused"] = done.job_ids, done.refused
        else:
            start = time.monotonic()
            for number, ident in enumerate(dict.fromkeys(wanted.ids)):
                await asyncio.sleep(max(0.0, start + number / wanted.per_second - time.monotonic()))
                try:
                    state["replayed"].append((await dead_letter.replay(store, redis, ident)).job_id)
                except JobError as error:
                    state["refused"][ident] = redact_text(str(error))
        state["state"] = "done"
    except BaseException as error:
        state["state"] = f"stopped: {type(error).__name__}"
        raise


def _brief(one: dead_letter.DeadLetter) -> dict[str, Any]:
    return {
        "id": one.id,
        "queue": one.queue,
        "job_id": one.job_id,
        "name": one.name,
        "cause": one.cause,
        "reason": redact_text(one.reason),
        "attempts_made": one.attempts_made,
        "failed_at": one.failed_at,
        "archived_at": one.archived_at,
        "replayed_at": one.replayed_at,
    }
