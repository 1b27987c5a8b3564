"""The queues as a whole: how each is doing, their workers, what runs by the clock, pause and resume."""

import asyncio
import base64
import contextlib
import math
import time
import uuid
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from croniter import croniter
from fastapi import APIRouter
from redis.exceptions import NoPermissionError

from studyhall.patterns import health
from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.redaction import redact
from studyhall.patterns.core.store import StoreUnavailable
from studyhall.patterns.dead_letter import counts
from studyhall.patterns.dead_letter.archive import parsed
from studyhall.patterns.schedule import history as ticks

from .problems import Problem
from .state import STATES, Admin, Console, JobId, QueueName, State, hashes, number

router = APIRouter(prefix="/admin", tags=["admin"])
SAMPLE_SECONDS = 5.0
SHOWN_ACTIVE = 100  # running jobs per queue in the view of the workers
SHOWN_SCHEDULES = 200
LATE = 10.0  # seconds after which a tick that did not run is overdue


@router.get("/session")
async def session(console: State, _: Admin) -> dict[str, Any]:
    """The token is right. Asks no server: whether one is down says nothing about a token."""
    return {"token": "accepted", "adds": console.adds}


@router.get("/queues")
async def queues(console: State, _: Admin) -> dict[str, Any]:
    """Counts by state, age of the oldest job that should run, share of failures, ends in the last minute, workers."""
    sample = await measured(console)
    last = console.history[-1]["at"] if console.history else 0.0
    if sample["at"] >= last + SAMPLE_SECONDS:
        console.history.append(sample)
    return sample


@router.get("/history")
async def history(console: State, _: Admin) -> list[dict[str, Any]]:
    """The same every five seconds for the last 15 minutes, as this process saw it: for charts."""
    return list(console.history)


async def measured(console: Console) -> dict[str, Any]:
    since = (time.time() - 60) * 1000
    names, odd = await console.readable((*STATES, "meta"))
    letters = counts(console.store) if console.store and "dead_letters" in await console.tables() else None
    died = (await letters(since / 1000))[1] if letters else {}
    async with console.bounded():
        report = await health.measure(console.redis, names, dead_letters=letters, prefix=console.producer.prefix)
        async with console.redis.pipeline(transaction=False) as pipe:
            for queue in names:
                ended = console.key(queue, "completed")
                pipe.zcount(ended, since, "+inf").zcard(ended)
                pipe.zcount(console.key(queue, "failed"), since, "+inf")
            ends = iter(await pipe.execute())
    rows = report.as_dict()
    for row in rows["queues"]:
        row["completed_last_minute"], row["completed"], failed = next(ends), next(ends), next(ends)
        row["failed_last_minute"] = failed + died.get(row["queue"], 0)
    return {**rows, "unreadable": odd, "at": time.time()}


async def sampling(console: Console) -> None:
    """Keeps the charts going while no page is open."""
    while True:
        with contextlib.suppress(QueueUnavailable, StoreUnavailable):
            console.history.append(await measured(console))
        await asyncio.sleep(SAMPLE_SECONDS)


@router.post("/queues/{queue}/pause")
async def pause(console: State, _: Admin, queue: QueueName) -> dict[str, bool]:
    """No worker, in whatever language, takes a job from it any more; running jobs are finished."""
    await console.known(queue)
    async with console.bounded():
        await console.producer.queue(queue).pause()
    return {"paused": True}


@router.post("/queues/{queue}/resume")
async def resume(console: State, _: Admin, queue: QueueName) -> dict[str, bool]:
    await console.known(queue)
    async with console.bounded():
        # Jobs that an older BullMQ put aside are brought back 7,000 at a time.
        while await console.producer.queue(queue).resume():
            pass
    return {"paused": False}


@router.get("/workers")
async def workers(console: State, _: Admin) -> dict[str, Any]:
    """The connected workers, what runs, since when and where; `workers` is null if this Redis user may not list
    connections."""
    names, odd = await console.readable(["active"])
    async with console.bounded():
        try:
            clients = await console.redis.client_list()
        except NoPermissionError:
            clients = None
        active = [row for queue in names for row in await _active(console, queue)]
        async with console.redis.pipeline(transaction=False) as pipe:
            for queue in names:
                pipe.llen(console.key(queue, "active"))
            running = sum(await pipe.execute())
    listed = None if clients is None else [worker for queue in names for worker in _workers(console, queue, clients)]
    known = {"queues": sorted([*names, *odd]), "unreadable": odd}
    return {"workers": listed, "active": active, "running": running, **known, "at": time.time()}


def _workers(console: Console, queue: str, clients: list[dict[str, str]]) -> list[dict[str, Any]]:
    """BullMQ names a worker's connection after its queue: in Node in base64, in Python as it is. A Queuesmith worker
    has one of each, so only the more frequent form is counted."""
    forms = []
    for shown in (base64.b64encode(queue.encode()).decode(), queue):
        own = f"{console.producer.prefix}:{shown}"
        named = [client for client in clients if client["name"] == own or client["name"].startswith(f"{own}:w:")]
        forms.append([(client, client["name"][len(own) + 3 :]) for client in named])
    return [
        {
            "queue": queue,
            "name": name,
            "address": client.get("addr", ""),
            "library": " ".join(filter(None, (client.get("lib-name"), client.get("lib-ver")))),
            "connected": int(client.get("age") or 0),
            "idle": int(client.get("idle") or 0),
        }
        for client, name in max(forms, key=len)
    ]


async def _active(console: Console, queue: str) -> list[dict[str, Any]]:
    ids = await console.redis.lrange(console.key(queue, "active"), -SHOWN_ACTIVE, -1)
    async with console.redis.pipeline(transaction=False) as pipe:
        for ident in ids:
            pipe.hmget(console.key(queue, ident), "name", "processedOn", "pb", "ats")
            pipe.pttl(console.key(queue, ident, "lock"))
        answers = await hashes(pipe, [None] * 4)
    return [
        {
            "queue": queue,
            "id": ident,
            "name": name or "",
            "started_at": (number(started) or 0) / 1000 or None,
            "worker": worker or None,
            "starts": int(number(starts) or 0),
            # If not, its worker is gone, and the next stalled check gives it to another.
            "held": lock > 0,
        }
        for ident, (name, started, worker, starts), lock in zip(ids, answers[::2], answers[1::2], strict=True)
    ]


@router.get("/schedules")
async def schedules(console: State, _: Admin) -> dict[str, Any]:
    """BullMQ's job schedulers: what runs by the clock, next and last, what is overdue, and also missed ticks if a
    Queuesmith service keeps its ticks in the store."""
    rows, total, now = [], 0, time.time()
    past, missed_at = await _ticks(console)
    names, odd = await console.readable(["repeat"])
    async with console.bounded():
        for queue in names:
            key = console.key(queue, "repeat")
            due = await console.redis.zrange(key, 0, SHOWN_SCHEDULES - 1, withscores=True)
            total += await console.redis.zcard(key)
            async with console.redis.pipeline(transaction=False) as pipe:
                for ident, _score in due:
                    pipe.hgetall(console.key(queue, "repeat", ident))
                found = await hashes(pipe, {})
            async with console.redis.pipeline(transaction=False) as pipe:
                lasts = [_last(fields, score) for fields, (_ident, score) in zip(found, due, strict=True)]
                for (ident, _score), last in zip(due, lasts, strict=True):
                    job = console.key(queue, "repeat", ident, str(int(last or 0)))
                    pipe.hmget(job, "finishedOn", "failedReason", "processedOn")
                ends = await hashes(pipe, [None] * 3)
            for (ident, score), fields, last, (ended, failed, started) in zip(due, found, lasts, ends, strict=True):
                created, made = number(fields.get("startDate")), int(number(fields.get("ic")) or 1)
                known = last if last and (started or made > 1) else None
                rows.append(
                    {
                        "queue": queue,
                        "id": ident,
                        "name": fields.get("name") or "",
                        "pattern": fields.get("pattern"),
                        "every": number(fields.get("every")),
                        "tz": fields.get("tz"),
                        "next": score / 1000,
                        "overdue": now - score / 1000 > LATE,
                        "last": known / 1000 if known else None,
                        "last_state": "failed" if failed else "completed" if ended else "active" if started else None,
                        "last_job": f"repeat:{ident}:{int(last)}" if last and started else None,
                        "ran": max(0, made - 1),  # the last of them is the next to come
                        "starts": created / 1000 if created else None,
                        "payload": redact(parsed(fields.get("data"))),
                        "missed": past[ident].missed if ident in past else 0,
                        "skipped": past[ident].skipped if ident in past else 0,
                        "missed_at": missed_at.get(ident, []),
                        "unreadable": None if fields else "its key holds no schedule",
                    }
                )
    return {"schedules": rows, "total": total, "unreadable": odd}


async def _ticks(console: Console) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """What the store knows of each schedule, and the latest missed ticks; nothing if the store is down."""
    with contextlib.suppress(StoreUnavailable):
        if {"schedule_state", "schedule_missed"} <= await console.tables():
            store = console.database()
            past = await ticks.past(store)
            late = {ident: await ticks.missed(store, ident) for ident, row in past.items() if row.missed}
            return past, {ident: [slot / 1000 for slot in slots] for ident, slots in late.items()}
    return {}, {}


@router.post("/schedules/{queue}/{schedule_id}/run")
async def run_now(console: State, _: Admin, queue: QueueName, schedule_id: JobId) -> dict[str, str]:
    """One extra run. A signed payload is valid only for its own tick: then the next tick is brought forward instead."""
    await console.known(queue)
    handle: Any = console.producer.queue(queue)
    async with console.bounded():
        scheduler = None
        with contextlib.suppress(ValueError):  # bullmq-Python unpacks the empty answer for a missing one
            scheduler = await handle.getJobScheduler(schedule_id)
        if scheduler is None:
            raise Problem(404, "not-found", f"There is no schedule {schedule_id!r} in {queue}.")
        template = scheduler.get("template") or {}
        data = template.get("data")
        if isinstance(data, dict) and "sig" in data:
            ident, done = f"repeat:{schedule_id}:{int(scheduler['next'])}", "brought forward"
            job = await handle.getJob(ident)
            if job is None:
                raise Problem(409, "conflict", "Its next tick is no longer waiting. Look again.")
            await job.promote()
            return {"job_id": ident, "done": done}
        # No long number in it: logs redact those, because they could be card numbers.
        ident = f"{schedule_id}-by-hand-{uuid.uuid4().hex[:12]}"
        opts = {name: value for name, value in (template.get("opts") or {}).items() if name != "repeat"}
        await handle.add(scheduler.get("name") or schedule_id, data, {**opts, "jobId": ident})
    return {"job_id": ident, "done": "added"}


def _last(fields: dict[str, str], due: float) -> float | None:
    """The tick before this one, by the schedule's own rule."""
    if not math.isfinite(due):
        return None
    if every := number(fields.get("every")):
        return due - every
    try:
        zone = ZoneInfo(fields.get("tz") or "UTC")
        before = croniter(fields["pattern"], datetime.fromtimestamp(due / 1000, zone), second_at_beginning=True)
        return float(before.get_prev(float)) * 1000
    except (KeyError, ValueError, OSError):
        return None
