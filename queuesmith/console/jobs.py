"""Jobs: all of them page by page, found by id or name, with tries, logs, result and flow.

No command reads more than a page of a state, so a list of 100,000 blocks the server for a millisecond at a time.
BullMQ's own script for a job's state reads whole lists; here each state is asked only for the job.
"""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from studyhall.patterns import cancel as cancelling
from studyhall.patterns.core.job import cancelled
from studyhall.patterns.core.redaction import redact, redact_text
from studyhall.patterns.dead_letter import dead_letters, find
from studyhall.patterns.dead_letter.archive import parsed

from .problems import Problem
from .state import LISTS, QUEUE, STATES, Admin, Console, JobId, QueueName, State, hashes, number

router = APIRouter(prefix="/admin", tags=["admin"])
MAX_EVENTS_READ = 5_000
MAX_FLOW = 200
MAX_LOGS = 500
MAX_TEXT = 200_000  # characters of a payload or result that are shown
MAX_EXPORT = 10_000
SEARCH_SECONDS = 0.15  # then the rest of a long list waits for the next request
SEARCHED = 500  # jobs per step of a search
FAR = 100_000  # how far into a list a job is searched for: about 2 ms
ROW = ("name", "timestamp", "processedOn", "finishedOn", "atm", "failedReason", "progress", "pb", "opts")
NEWEST_FIRST = frozenset({"failed", "completed"})
SHOWN = frozenset({"added", "waiting", "waiting-children", "active", "delayed", "completed", "failed", "stalled"})
JobState = Literal["active", "wait", "paused", "prioritized", "delayed", "waiting-children", "failed", "completed"]
Queue = Annotated[str | None, Query(pattern=QUEUE)]
Word = Annotated[str | None, Query(max_length=200, description="an id, or a part of an id or name")]


class Reason(BaseModel):
    reason: Annotated[str, Field(max_length=500)] = "stopped by an administrator"


class NewJob(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queue: Annotated[str, Field(pattern=QUEUE)]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    data: Any = None
    job_id: Annotated[
        str | None, Field(max_length=200, pattern=r"^[^\x00-\x1f:/]*[^\x00-\x1f:/0-9][^\x00-\x1f:/]*$")
    ] = None
    delay: Annotated[float, Field(ge=0, le=366 * 24 * 3600, description="seconds")] = 0.0
    priority: Annotated[int, Field(ge=0, le=2_097_151)] = 0
    attempts: Annotated[int, Field(ge=1, le=100)] = 1


@router.get("/jobs")
async def jobs(
    console: State,
    _: Admin,
    queue: Queue = None,
    state: JobState | None = None,
    q: Word = None,
    page: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    size: Annotated[int, Query(ge=1, le=100)] = 25,
    offset: Annotated[int, Query(ge=0, description="with q: where to go on, `next` of the answer before")] = 0,
) -> dict[str, Any]:
    """One page of the jobs: those served next first, ended ones newest first. With `q` those that match; `next` is
    where to continue, null at the end."""
    names, odd = await console.readable(STATES, queue)
    async with console.bounded():
        parts = await _parts(console, names, [state] if state else STATES)
        total = sum(count for _, _, count in parts)
        known = {"queue": queue, "state": state, "total": total, "page": page, "size": size, "unreadable": odd}
        if not (word := (q or "").strip()):
            rows = await page_of(console, parts, page * size, size)
            return {**known, "jobs": rows, "next": None, "looked": 0}
        rows = await _exact(console, names, state, word) if offset == 0 else []
        there = {(row["queue"], row["id"]) for row in rows}
        until, low = time.monotonic() + SEARCH_SECONDS, word.lower()
        while offset < total and len(rows) < size and time.monotonic() < until:
            batch = await page_of(console, parts, offset, SEARCHED)
            if not batch:  # they ended while we looked
                offset = total
            for row in batch:
                offset += 1
                if _matches(row, low) and (row["queue"], row["id"]) not in there:
                    rows.append(row)
                if len(rows) == size:
                    break
    return {**known, "jobs": rows, "next": offset if offset < total else None, "looked": offset}


@router.get("/jobs/export")
async def export(
    console: State, _: Admin, queue: Queue = None, state: JobState | None = None, q: Word = None
) -> StreamingResponse:
    """The first 10,000 of these, or of those that match `q`, as a JSON array: payloads and results, secrets masked."""
    names, _odd = await console.readable(STATES, queue)
    async with console.bounded():
        parts = await _parts(console, names, [state] if state else STATES)

    async def rows() -> AsyncIterator[str]:
        word, offset, given = (q or "").strip().lower(), 0, 0
        while given < MAX_EXPORT:
            async with console.bounded():
                batch = await page_of(console, parts, offset, 100, whole=True)
            if not batch:
                break
            offset += 100
            fitting = [row for row in batch if _matches(row, word)][: MAX_EXPORT - given]
            if fitting:
                yield ",\n" if given else "["
                yield ",\n".join(to_json(row, inf_nan_mode="null").decode() for row in fitting)
            given += len(fitting)
        yield "]\n" if given else "[]\n"

    return StreamingResponse(rows(), media_type="application/json")


@router.post("/jobs", status_code=201)
async def add(console: State, _: Admin, wanted: NewJob) -> dict[str, str]:
    """Add a job by BullMQ's own script. A missing queue is created."""
    if not console.adds:
        raise Problem(403, "no-adding", "Jobs of this service are signed by it: add them through its own API.")
    opts: dict[str, Any] = {"attempts": wanted.attempts, "priority": wanted.priority}
    if wanted.delay:
        opts["delay"] = int(wanted.delay * 1000)
    if wanted.job_id:
        opts["jobId"] = wanted.job_id
    if console.queues is not None:
        await console.known(wanted.queue)
    async with console.bounded():
        if wanted.job_id and await console.redis.exists(console.key(wanted.queue, wanted.job_id)):
            raise Problem(409, "conflict", "There is a job with this id. BullMQ would ignore the new one.")
        made: Any = await console.producer.queue(wanted.queue).add(wanted.name, wanted.data, opts)
    return {"queue": wanted.queue, "id": str(made.id)}


@router.get("/jobs/{queue}/{job_id:path}")
async def job(console: State, _: Admin, queue: QueueName, job_id: JobId) -> dict[str, Any]:
    """One job: payload with secrets masked, every attempt with its error, logs, result, its earlier deaths."""
    await console.known(queue)
    client, key = console.redis, console.key(queue, job_id)
    async with console.bounded():
        fields: dict[str, str] = await client.hgetall(key) if await client.type(key) == "hash" else {}
        place = await where(console, queue, job_id)
        happened = await _timeline(client, console.key(queue, "events"), job_id)
        logs = await client.lrange(f"{key}:logs", -MAX_LOGS, -1)
        logged = await client.llen(f"{key}:logs")
    deaths = []
    if console.store is not None and "dead_letters" in await console.tables():
        same = (dead_letters.c.queue == queue) & (dead_letters.c.job_id == job_id)
        deaths = await find(console.store, same, limit=20)
    # Without a position it is only likely to be in a list of that length.
    if not fields.get("name") and not deaths and (place["state"] == "unknown" or place.get("position", 0) is None):
        raise Problem(404, "not-found", f"There is no job {job_id!r} in {queue}, nor a dead letter of one.")
    if not fields and deaths:
        fields = {name: str(value) for name, value in deaths[0].snapshot["fields"].items()}
        place = {"state": "dead"}
    row = _row(queue, job_id, place["state"], fields.get("returnvalue"), *(fields.get(name) for name in ROW))
    return {
        **row,
        **{name: value for name, value in place.items() if name != "state"},
        "starts": int(number(fields.get("ats")) or 0),
        "stalls": int(number(fields.get("stc")) or 0),
        "options": redact(parsed(fields.get("opts"))),
        "payload": _shown(_unsigned(parsed(fields.get("data"))), fields.get("data")),
        "result": _shown(parsed(fields.get("returnvalue")), fields.get("returnvalue")),
        "parent": _ident(console, fields.get("parentKey", "")) or None,
        "attempts_failed": [
            {"attempt": attempt, "error": error} for attempt, error in enumerate(_traces(fields.get("stacktrace")), 1)
        ],
        "logs": [redact_text(line) for line in logs],
        "logged": logged,
        "cancellable": console.store is not None and is_ours(parsed(fields.get("data"))),
        "timeline": happened,
        "deaths": [
            {"id": death.id, "at": death.failed_at, "cause": death.cause, "reason": redact_text(death.reason)}
            for death in deaths
        ],
    }


@router.post("/jobs/{queue}/{job_id}/cancel")
async def cancel_job(
    console: State, _: Admin, queue: QueueName, job_id: JobId, why: Reason | None = None
) -> list[dict[str, str]]:
    """Stop a job of a Queuesmith service and the rest of its flow, even while it runs."""
    await console.known(queue)
    async with console.bounded():
        stopped = await cancelling.cancel(
            console.redis, console.database(), queue, job_id, (why or Reason()).reason, prefix=console.producer.prefix
        )
    return [{"queue": job.queue, "job_id": job.job_id, "state": job.state, "reason": job.reason} for job in stopped]


@router.get("/flows/{queue}/{job_id}")
async def flow(console: State, _: Admin, queue: QueueName, job_id: JobId) -> dict[str, Any]:
    """The whole flow a job belongs to, for drawing: `from` runs before `to`."""
    await console.known(queue)
    client = console.redis
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, str]] = []
    async with console.bounded():
        root = console.key(queue, job_id)
        for _step in range(100):
            parent = await client.hget(root, "parentKey")
            if not parent or not await client.exists(parent):
                break
            root = parent
        level, seen = [root], {root}
        while level and len(nodes) < MAX_FLOW:
            deeper: list[str] = []
            for key in level[: MAX_FLOW - len(nodes)]:
                nodes.append(await _node(console, key))
                children = set((await client.sscan(f"{key}:dependencies", count=MAX_FLOW))[1])
                for ended in ("processed", "failed"):
                    children |= set((await client.hscan(f"{key}:{ended}", count=MAX_FLOW))[1])
                children |= set(await client.zrange(f"{key}:unsuccessful", 0, MAX_FLOW))
                for child in sorted(children):
                    edges.append({"from": _ident(console, child), "to": _ident(console, key)})
                    if child not in seen:
                        seen.add(child)
                        deeper.append(child)
            level = deeper
    if len(nodes) == 1 and nodes[0]["state"] == "unknown":
        raise Problem(404, "not-found", f"There is no job {job_id!r} in {queue}.")
    return {"nodes": nodes, "edges": edges}


async def where(console: Console, queue: str, job_id: str) -> dict[str, Any]:
    """Its state, `position` in line, and `due` of a delayed one."""
    client, sets = console.redis, STATES[len(LISTS) :]
    async with client.pipeline(transaction=False) as pipe:
        for state in sets:
            pipe.zscore(console.key(queue, state), job_id)
        pipe.lpos(console.key(queue, "active"), job_id, maxlen=FAR)
        *scores, running = await pipe.execute()
    if running is not None:
        return {"state": "active"}
    for state, score in zip(sets, scores, strict=True):
        if score is not None:
            answer: dict[str, Any] = {"state": state}
            if state == "delayed":
                answer["due"] = score // 0x1000 / 1000
            elif state == "prioritized":
                answer["position"] = 1 + int(await client.zrank(console.key(queue, state), job_id) or 0)
            return answer
    for name in ("wait", "paused"):
        # The job served next is at the end.
        place = await client.lpos(console.key(queue, name), job_id, rank=-1, maxlen=FAR)
        if place is not None:
            return {"state": name, "position": await client.llen(console.key(queue, name)) - place}
        if await client.llen(console.key(queue, name)) > FAR:
            return {"state": name, "position": None}
    return {"state": "unknown"}


Part = tuple[str, str, int]  # queue, state, how many


async def _parts(console: Console, queues: Sequence[str], states: Sequence[str]) -> list[Part]:
    """The states as one long list: each queue's share of it."""
    pairs = [(queue, state) for state in states for queue in queues]
    async with console.redis.pipeline(transaction=False) as pipe:
        for queue, state in pairs:
            key = console.key(queue, state)
            pipe.llen(key) if state in LISTS else pipe.zcard(key)
        counts = await pipe.execute()
    return [(*pair, count) for pair, count in zip(pairs, counts, strict=True) if count]


async def page_of(
    console: Console, parts: Sequence[Part], start: int, size: int, *, whole: bool = False
) -> list[dict[str, Any]]:
    """The jobs from `start` on. A job that moves between two pages is seen twice, or missed until the next look."""
    client = console.redis
    ids: list[tuple[str, str, str, float]] = []
    for queue, state, count in parts:
        if start >= count:
            start -= count
            continue
        key, take = console.key(queue, state), min(size - len(ids), count - start)
        if state in LISTS:
            members = [(ident, 0.0) for ident in (await client.lrange(key, -start - take, -start - 1))[::-1]]
        else:
            last = start + take - 1
            members = await client.zrange(key, start, last, desc=state in NEWEST_FIRST, withscores=True)
        ids += [(queue, state, ident, score) for ident, score in members]
        start = 0
        if len(ids) >= size:
            break
    more = ("data", "returnvalue", "stacktrace") if whole else ()
    async with client.pipeline(transaction=False) as pipe:
        for queue, state, ident, _score in ids:
            # A result can be large, and only a completed job's tells its state.
            result = "returnvalue" if state == "completed" and size <= 100 else "-"
            pipe.hmget(console.key(queue, ident), result, *ROW, *more)
        answers = await hashes(pipe, [None] * (1 + len(ROW) + len(more)))
    rows = []
    for (queue, state, ident, score), values in zip(ids, answers, strict=True):
        row = _row(queue, ident, state, *values[: len(ROW) + 1])
        if state == "delayed":
            row["due"] = score // 0x1000 / 1000
        if whole:
            opts, data, result = (parsed(text) for text in values[len(ROW) : -1])
            row |= {"payload": redact(_unsigned(data)), "result": redact(result), "options": redact(opts)}
            row["attempts_failed"] = _traces(values[-1])
        rows.append(row)
    return rows


async def _exact(console: Console, queues: Sequence[str], state: str | None, job_id: str) -> list[dict[str, Any]]:
    """The job of this id in each queue, whatever the size of the lists."""
    async with console.redis.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.type(console.key(queue, job_id))
        kinds = await pipe.execute()
    rows = []
    for queue, kind in zip(queues, kinds, strict=True):
        if kind != "hash":
            continue
        values = await console.redis.hmget(console.key(queue, job_id), "returnvalue", *ROW)
        place = await where(console, queue, job_id)
        if values[1] is not None and state in (None, place["state"]):
            rows.append({**_row(queue, job_id, place["state"], *values), **_due(place)})
    return rows


def _matches(row: dict[str, Any], word: str) -> bool:
    return word in row["id"].lower() or word in row["name"].lower()


def _due(place: dict[str, Any]) -> dict[str, Any]:
    return {"due": place["due"]} if "due" in place else {}


async def _node(console: Console, key: str) -> dict[str, Any]:
    queue, _, ident = key.removeprefix(f"{console.producer.prefix}:").partition(":")
    name, progress, result = await console.redis.hmget(key, "name", "progress", "returnvalue")
    state = (await where(console, queue, ident))["state"] if name else "unknown"
    state = _named(state, result)
    done = parsed(progress)
    percent = 100.0 if state == "completed" else (isinstance(done, dict) and number(str(done.get("percent")))) or 0.0
    return {
        "id": _ident(console, key),
        "queue": queue,
        "job_id": ident,
        "name": name or "",
        "state": state,
        "percent": percent,
    }


def _ident(console: Console, key: str) -> str:
    return key.removeprefix(f"{console.producer.prefix}:").replace(":", "/", 1)


async def _timeline(client: Any, key: str, job_id: str) -> list[dict[str, Any]]:
    """What the queue's event stream still knows about the job, oldest first."""
    events: list[dict[str, Any]] = []
    last, left = "+", MAX_EVENTS_READ
    while left > 0:
        rows = await client.xrevrange(key, last, count=min(1_000, left))
        for ident, fields in rows:
            if fields.get("jobId") == job_id and fields.get("event") in SHOWN:
                at = int(ident.partition("-")[0]) / 1000
                detail = fields.get("failedReason") or fields.get("prev") or ""
                events.append({"at": at, "event": fields["event"], "detail": redact_text(detail)})
        if len(rows) < 1_000:
            break
        last, left = f"({rows[-1][0]}", left - len(rows)
    return events[::-1]


def _row(queue: str, ident: str, state: str, result: str | None, *values: str | None) -> dict[str, Any]:
    """`values` are those of ROW."""
    name, added, started, ended, attempts, reason, progress, worker, opts = values
    odd = [field for field, text in zip(ROW[1:5], values[1:5], strict=True) if text and number(text) is None]
    odd += [] if (opts or "{").lstrip().startswith("{") else ["opts"]
    done = parsed(progress)
    if type(done) in (int, float):
        done = {"percent": done}
    return {
        "queue": queue,
        "id": ident,
        "name": name or "",
        "state": _named(state, result),
        "added_at": _seconds(added),
        "started_at": _seconds(started),
        "ended_at": _seconds(ended),
        "attempts_made": int(number(attempts) or 0),
        "reason": redact_text(reason) if reason else None,
        "progress": redact(done) if isinstance(done, dict) else None,
        "worker": worker or None,
        "unreadable": "its key holds no job" if name is None else f"odd: {', '.join(odd)}" if odd else None,
    }


def _named(state: str, result: str | None) -> str:
    """To BullMQ a cancelled job is a completed one with that result; to people it is not."""
    ended = state == "completed" and cancelled(parsed(result)) is not None
    return "cancelled" if ended else state


def is_ours(data: Any) -> bool:
    """In the envelope of a Queuesmith service, whose pipeline checks whether it was cancelled."""
    return isinstance(data, dict) and "payload" in data and "v" in data


def _shown(value: Any, text: str | None) -> Any:
    return redact(value) if len(text or "") <= MAX_TEXT else redact_text(f"{(text or '')[:MAX_TEXT]} … cut off")


def _unsigned(data: Any) -> Any:
    """Without its signature."""
    return {name: value for name, value in data.items() if name != "sig"} if isinstance(data, dict) else data


def _traces(text: str | None) -> list[str]:
    traces = parsed(text)
    return [redact_text(str(trace)) for trace in traces] if isinstance(traces, list) else []


def _seconds(milliseconds: str | None) -> float | None:
    return (number(milliseconds) or 0) / 1000 or None
