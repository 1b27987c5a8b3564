"""Admin: queues, jobs, flows. Payloads and errors are shown with secrets masked."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from studyhall.patterns import cancel as cancelling
from studyhall.patterns import dead_letter, health
from studyhall.patterns.core.job import cancelled
from studyhall.patterns.core.redaction import redact, redact_text
from studyhall.patterns.dead_letter import counts, dead_letters, find
from studyhall.patterns.health.listing import LISTS

from .problems import Problem
from .state import Admin, ApiState, State

__all__ = ["measured", "router"]

router = APIRouter(prefix="/admin", tags=["admin"])
MAX_EVENTS_READ = 5_000
MAX_FLOW = 200
QueueName = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
JobId = Annotated[str, Path(pattern=r"^[^\x00-\x1f/]{1,200}$")]
ROW = ("name", "timestamp", "processedOn", "finishedOn", "atm", "failedReason", "progress", "returnvalue")
STATES = "wait|paused|active|prioritized|delayed|completed|failed|waiting-children"
TOLD = frozenset(
    {"added", "waiting", "waiting-children", "active", "delayed", "completed", "failed", "stalled"}
)


class Reason(BaseModel):
    reason: Annotated[str, Field(max_length=500)] = "stopped by an administrator"


@router.get("/queues")
async def queues(api: State, _: Admin) -> dict[str, Any]:
    """Counts by state, age of the oldest job that should run, share of failures, ends in the last minute."""
    return await measured(api)


@router.get("/history")
async def history(api: State, _: Admin) -> list[dict[str, Any]]:
    """The same every five seconds for the last quarter of an hour, as this process saw it: for charts."""
    return list(api.history)


async def measured(api: ApiState) -> dict[str, Any]:
    app = api.app
    since = (time.time() - 60) * 1000
    async with app.producer.bounded(5.0):
        found = await health.measure(app.producer.redis, app.jobs.queues, dead_letters=counts(app.store))
        client: Any = app.producer.redis
        async with client.pipeline(transaction=False) as pipe:
            for queue in app.jobs.queues:
                pipe.zcount(f"bull:{queue}:completed", since, "+inf").zcard(f"bull:{queue}:completed")
                pipe.zcount(f"bull:{queue}:failed", since, "+inf")
            ends = iter(await pipe.execute())
    recent = await dead_letter.list_dead_letters(app.store, limit=200)
    rows = found.as_dict()
    for row in rows["queues"]:
        row["completed_last_minute"], row["completed"], failed = next(ends), next(ends), next(ends)
        died = sum(one.queue == row["queue"] and one.failed_at * 1000 > since for one in recent)
        row["failed_last_minute"] = failed + died
    return {**rows, "at": time.time()}


@router.get("/jobs")
async def jobs(
    api: State,
    _: Admin,
    queue: Annotated[str, Query(pattern=r"^[A-Za-z0-9._-]{1,100}$")],
    state: Annotated[str, Query(pattern=f"^(?:{STATES})$")] = "active",
    page: Annotated[int, Query(ge=0, le=10_000)] = 0,
    size: Annotated[int, Query(ge=1, le=100)] = 25,
) -> dict[str, Any]:
    """One page of the jobs in a state: next to be served first, ended ones newest first."""
    _known(api, queue)
    client: Any = api.app.producer.redis
    key, start = f"bull:{queue}:{state}", page * size
    async with api.app.producer.bounded():
        if state in LISTS:
            ids = (await client.lrange(key, -start - size, -start - 1))[::-1]
            total = await client.llen(key)
        else:
            ended = state in ("completed", "failed")
            ids = await client.zrange(key, start, start + size - 1, desc=ended)
            total = await client.zcard(key)
        async with client.pipeline(transaction=False) as pipe:
            for ident in ids:
                pipe.hmget(f"bull:{queue}:{ident}", *ROW)
            found = await pipe.execute()
    rows = [_row(queue, ident, state, *values) for ident, values in zip(ids, found, strict=True)]
    return {"queue": queue, "state": state, "page": page, "size": size, "total": total, "jobs": rows}


@router.get("/jobs/{queue}/{job_id}")
async def job(api: State, _: Admin, queue: QueueName, job_id: JobId) -> dict[str, Any]:
    """One job: payload with secrets masked, every attempt with its error, its earlier deaths."""
    _known(api, queue)
    client: Any = api.app.producer.redis
    key = f"bull:{queue}:{job_id}"
    async with api.app.producer.bounded():
        fields: dict[str, str] = await client.hgetall(key) if await client.type(key) == "hash" else {}
        state = str(await api.app.producer.queue(queue).getJobState(job_id)) if fields else "gone"
        happened = await _timeline(client, queue, job_id)
    same = (dead_letters.c.queue == queue) & (dead_letters.c.job_id == job_id)
    deaths = await find(api.app.store, same, limit=20)
    if not fields.get("name") and not deaths:
        raise Problem(404, "not-found", f"There is no job {job_id!r} in {queue}, nor a dead letter of one.")
    if not fields:
        fields = {name: str(value) for name, value in deaths[0].snapshot["fields"].items()}
        state = "dead"
    traces = _parsed(fields.get("stacktrace")) or []
    return {
        **_row(queue, job_id, state, *(fields.get(name) for name in ROW)),
        "starts": int(fields.get("ats") or 0),
        "stalls": int(fields.get("stc") or 0),
        "options": redact(_parsed(fields.get("opts"))),
        "payload": redact(_unsigned(_parsed(fields.get("data")))),
        "result": redact(_parsed(fields.get("returnvalue"))),
        "parent": fields.get("parentKey", "").removeprefix("bull:").replace(":", "/", 1) or None,
        "attempts_failed": [
            {"attempt": number, "error": redact_text(str(trace))} for number, trace in enumerate(traces, 1)
        ],
        "timeline": happened,
        "deaths": [
            {"id": one.id, "at": one.failed_at, "cause": one.cause, "reason": redact_text(one.reason)}
            for one in deaths
        ],
    }


@router.post("/jobs/{queue}/{job_id}/cancel")
async def cancel_job(
    api: State, _: Admin, queue: QueueName, job_id: JobId, why: Reason | None = None
) -> list[dict[str, str]]:
    """Stop a job and the rest of its flow."""
    _known(api, queue)
    async with api.app.producer.bounded():
        stopped = await cancelling.cancel(
            api.app.producer.redis, api.app.store, queue, job_id, (why or Reason()).reason
        )
    return [
        {"queue": one.queue, "job_id": one.job_id, "state": one.state, "reason": one.reason}
        for one in stopped
    ]


@router.get("/flows/{queue}/{job_id}")
async def flow(api: State, _: Admin, queue: QueueName, job_id: JobId) -> dict[str, Any]:
    """The whole flow a job belongs to, to be drawn: `from` runs before `to`."""
    _known(api, queue)
    client: Any = api.app.producer.redis
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, str]] = []
    async with api.app.producer.bounded(3.0):
        root = f"bull:{queue}:{job_id}"
        for _step in range(100):
            parent = await client.hget(root, "parentKey")
            if not parent or not await client.exists(parent):
                break
            root = parent
        level, seen = [root], {root}
        while level and len(nodes) < MAX_FLOW:
            deeper: list[str] = []
            for key in level:
                nodes.append(await _node(api, key))
                children = set(await client.smembers(f"{key}:dependencies"))
                children |= set(await client.hkeys(f"{key}:processed")) | set(
                    await client.hkeys(f"{key}:failed")
                )
                children |= set(await client.zrange(f"{key}:unsuccessful", 0, -1))
                for child in sorted(children):
                    edges.append({"from": _ident(child), "to": _ident(key)})
                    if child not in seen:
                        seen.add(child)
                        deeper.append(child)
            level = deeper
    if len(nodes) == 1 and nodes[0]["state"] == "unknown":
        raise Problem(404, "not-found", f"There is no job {job_id!r} in {queue}.")
    return {"nodes": nodes, "edges": edges}


def _known(api: ApiState, queue: str) -> None:
    if queue not in api.app.jobs.queues:
        there = ", ".join(api.app.jobs.queues)
        raise Problem(404, "not-found", f"There is no queue {queue!r}; there are {there}.")


async def _node(api: ApiState, key: str) -> dict[str, Any]:
    queue, _, ident = key.removeprefix("bull:").partition(":")
    client: Any = api.app.producer.redis
    name, progress, result = await client.hmget(key, "name", "progress", "returnvalue")
    state = str(await api.app.producer.queue(queue).getJobState(ident)) if name else "unknown"
    state = _told(state, result)
    done = _parsed(progress)
    percent = (
        100.0 if state == "completed" else float(done.get("percent", 0)) if isinstance(done, dict) else 0.0
    )
    return {
        "id": _ident(key),
        "queue": queue,
        "job_id": ident,
        "name": name or "",
        "state": state,
        "percent": percent,
    }


def _ident(key: str) -> str:
    return key.removeprefix("bull:").replace(":", "/", 1)


async def _timeline(client: Any, queue: str, job_id: str) -> list[dict[str, Any]]:
    """What the queue's event stream still knows about the job, oldest first."""
    found: list[dict[str, Any]] = []
    last, left = "+", MAX_EVENTS_READ
    while left > 0:
        rows = await client.xrevrange(f"bull:{queue}:events", last, count=min(1_000, left))
        for ident, fields in rows:
            if fields.get("jobId") == job_id and fields.get("event") in TOLD:
                at = int(ident.partition("-")[0]) / 1000
                detail = fields.get("failedReason") or fields.get("prev") or ""
                found.append({"at": at, "event": fields["event"], "detail": redact_text(detail)})
        if len(rows) < 1_000:
            break
        last, left = f"({rows[-1][0]}", left - len(rows)
    return found[::-1]


def _row(
    queue: str,
    ident: str,
    state: str,
    name: str | None,
    added: str | None,
    started: str | None,
    ended: str | None,
    attempts: str | None,
    reason: str | None,
    progress: str | None,
    result: str | None,
) -> dict[str, Any]:
    done = _parsed(progress)
    return {
        "queue": queue,
        "id": ident,
        "name": name or "",
        "state": _told(state, result),
        "added_at": _seconds(added),
        "started_at": _seconds(started),
        "ended_at": _seconds(ended),
        "attempts_made": int(attempts or 0),
        "reason": redact_text(reason) if reason else None,
        "progress": redact(done) if isinstance(done, dict) else None,
    }


def _told(state: str, result: str | None) -> str:
    """For BullMQ a cancelled job is a completed one with that result; for people it is not."""
    ended = state == "completed" and cancelled(_parsed(result)) is not None
    return "cancelled" if ended else state


def _unsigned(data: Any) -> Any:
    """Without its signature, which nobody has to see."""
    return {name: value for name, value in data.items() if name != "sig"} if isinstance(data, dict) else data


def _seconds(milliseconds: str | None) -> float | None:
    try:
        return float(milliseconds) / 1000 if milliseconds else None
    except ValueError:
        return None


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return None
