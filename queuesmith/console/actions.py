"""What an operator does to jobs: retry, promote or remove one or many by BullMQ's own scripts, so that workers in
every language agree; cancel many, which a Queuesmith service has to check for. Many are done in the background, in
small batches, no more than were confirmed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field, model_validator
from redis.exceptions import RedisError

from studyhall.patterns import cancel as cancelling
from studyhall.patterns.core.redaction import redact_text
from studyhall.patterns.dead_letter.archive import parsed

from .jobs import JobState, Reason, is_ours, where
from .problems import Problem
from .state import LISTS, QUEUE, Admin, Console, JobId, QueueName, State

router = APIRouter(prefix="/admin", tags=["admin"])
KEPT = 20
BATCH = 100  # by one script: about 2 ms
Action = Literal["retry", "promote", "remove"]
WAITING = frozenset({"wait", "paused", "prioritized", "delayed", "waiting-children"})
FITS: dict[str, frozenset[str]] = {
    "retry": frozenset({"failed", "completed"}),
    "promote": frozenset({"delayed"}),
    "remove": WAITING | {"failed", "completed"},
    "cancel": WAITING | {"active"},
}


class Many(BaseModel):
    """These `ids`, or the first `count` of the state: the number that was shown and confirmed."""

    model_config = ConfigDict(extra="forbid")

    action: Action | Literal["cancel"]
    queue: Annotated[str, Field(pattern=QUEUE)]
    state: JobState
    ids: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=500)] = []
    count: Annotated[int, Field(ge=0, le=10_000_000)] = 0

    @model_validator(mode="after")
    def fitting(self) -> Many:
        if bool(self.ids) == bool(self.count):
            raise ValueError("give ids, or the count of all of them")
        if self.state not in FITS[self.action]:
            raise ValueError(f"{self.action} is for jobs that are {' or '.join(sorted(FITS[self.action]))}")
        return self


@router.post("/jobs/{queue}/{job_id}/{action}")
async def act(console: State, _: Admin, queue: QueueName, job_id: JobId, action: Action) -> dict[str, str]:
    """Retry a failed or completed job, promote a delayed one, remove one that is not running."""
    await console.known(queue)
    async with console.bounded():
        await _one(console, action, queue, job_id)
    return {"queue": queue, "job_id": job_id, "done": action}


@router.post("/actions", status_code=202)
async def act_on_many(console: State, _: Admin, wanted: Many) -> dict[str, str]:
    """Start it; the answer's `href` shows its progress. Jobs not reached when this process stops stay as they are."""
    await console.known(wanted.queue)
    state = {"done": 0, "of": len(wanted.ids) or wanted.count, "refused": {}}
    return started(console, state, partial(_many, console, wanted))


@router.get("/actions/{action_id}")
async def action_state(
    console: State, _: Admin, action_id: Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
) -> dict[str, Any]:
    """Its progress. Known only to the process that runs it, until that stops."""
    if action_id not in console.running:
        raise Problem(404, "not-found", "The server was restarted. Jobs not done by then are as they were.")
    return console.running[action_id]


def started(
    console: Console, state: dict[str, Any], work: Callable[[dict[str, Any]], Awaitable[None]]
) -> dict[str, str]:
    """Run `work(state)` in the background; the answer says where to ask for its progress."""
    ident = uuid.uuid4().hex
    console.running[ident] = state | {"id": ident, "state": "running", "at": time.time()}
    for old in list(console.running)[:-KEPT]:
        del console.running[old]

    async def run(state: dict[str, Any]) -> None:
        try:
            await work(state)
            state["state"] = "done"
        except BaseException as error:
            state["state"] = f"stopped: {redact_text(str(error)) or type(error).__name__}"
            raise

    console.tasks.start(run(console.running[ident]), name=f"action {ident}")
    return {"id": ident, "href": f"/admin/actions/{ident}"}


async def _one(console: Console, action: str, queue: str, job_id: str, state: str | None = None) -> None:
    current = state or (await where(console, queue, job_id))["state"]
    if current not in FITS[action]:
        why = "it is running" if current == "active" else f"it is {current}"
        raise Problem(409, "conflict", f"{action} is not possible: {why}.")
    if action == "cancel":
        if not is_ours(parsed(await console.redis.hget(console.key(queue, job_id), "data"))):
            raise Problem(409, "conflict", "Its service does not check for cancellation. Remove it instead.")
        prefix = console.producer.prefix
        await cancelling.cancel(console.redis, console.database(), queue, job_id, Reason().reason, prefix=prefix)
        return
    # A BullMQ Job needs its payload and options; we need only the script.
    handle: Any = console.producer.queue(queue)
    try:
        if action == "promote":
            await handle.backend.promote(job_id)
        elif action == "remove":
            if not await handle.remove(job_id, {"removeChildren": True}):
                raise Problem(409, "conflict", "A worker holds it, or a schedule needs it. It was not removed.")
        else:
            job = await handle.getJob(job_id)
            if job is None:
                raise Problem(404, "not-found", "The job is gone.")
            await job.retry(current)
    except (Problem, RedisError, OSError):
        raise
    except Exception as error:  # BullMQ raises nothing more specific
        raise Problem(409, "conflict", redact_text(str(error))) from error


async def _many(console: Console, wanted: Many, state: dict[str, Any]) -> None:
    ids = wanted.ids
    if wanted.action == "cancel" and not ids:  # they stay until a worker ends them
        while len(ids) < wanted.count:
            async with console.bounded():
                more = await _next(console, wanted, len(ids), min(1_000, wanted.count - len(ids)))
            if not more:
                break
            ids += more
    elif not ids:
        await _all(console, wanted, state)
    for job_id in dict.fromkeys(ids):
        try:
            async with console.bounded():
                await _one(console, wanted.action, wanted.queue, job_id)
            state["done"] += 1
        except Problem as refused:
            state["refused"][job_id] = str(refused.detail)


async def _all(console: Console, wanted: Many, state: dict[str, Any]) -> None:
    """Batch by batch, only jobs there at the start: one that fails again meanwhile is not retried forever."""
    handle: Any = console.producer.queue(wanted.queue)
    key, now = console.key(wanted.queue, wanted.state), int(time.time() * 1000)
    while state["done"] < state["of"]:
        most = min(BATCH, state["of"] - state["done"])
        async with console.bounded():
            if wanted.action == "retry":
                left = await console.redis.zcount(key, "-inf", now)
                await handle.backend.retryJobs(wanted.state, most, now)
                moved = min(most, left)
            elif wanted.action == "promote":
                left = await console.redis.zcard(key)
                await handle.backend.promoteJobs(most)
                moved = min(most, left)
            elif wanted.state == "waiting-children" or wanted.state in LISTS:
                moved = await _remove_next(console, wanted, most)
            else:
                moved = len(await handle.clean(0, most, wanted.state))
        if not moved:
            break
        state["done"] += moved


async def _remove_next(console: Console, wanted: Many, most: int) -> int:
    """One by one: BullMQ's script that cleans a list reads all of it first."""
    moved = 0
    for job_id in await _next(console, wanted, 0, min(20, most)):
        try:
            await _one(console, "remove", wanted.queue, job_id, wanted.state)
            moved += 1
        except Problem:
            continue
    return moved


async def _next(console: Console, wanted: Many, start: int, most: int) -> list[str]:
    """Those served next come first."""
    key, redis = console.key(wanted.queue, wanted.state), console.redis
    if wanted.state in LISTS:
        return list(reversed(await redis.lrange(key, -start - most, -start - 1)))
    return list(await redis.zrange(key, start, start + most - 1))
