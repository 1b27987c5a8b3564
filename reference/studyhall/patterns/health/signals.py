"""Queue health: every state in which a job can wait, measured in a few short commands.

Promise: `measure` sees every state in which a job can wait (waiting, prioritized, overdue, paused), the age of the
oldest job that should have started, the share that failed, its workers, the dead letters, and how full Redis is,
in a few short commands per queue whatever its size. A depth alarm on `wait` alone sees no prioritized job.

When it does NOT hold: numbers are read one after the other, so they may disagree by what happened meanwhile. The
oldest age looks at the oldest job of each priority, by the order in which the queue will serve them. A server
without `maxmemory` is compared with its machine's memory, not with the limit of a container around it.
"""

import asyncio
import base64
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

__all__ = ["Health", "QueueHealth", "count_stalls", "measure", "memory_used", "problems"]

WINDOW = 300.0  # seconds over which failures are counted
KEPT = 1_000  # completed jobs that retention leaves: with this many, the window may be cut short
MOST_PRIORITIES = 32


@dataclass(frozen=True, slots=True)
class QueueHealth:
    queue: str
    waiting: int  # those of a paused queue too
    prioritized: int
    delayed: int  # all of them
    overdue: int  # of these, how many should have started
    paused: bool
    waiting_children: int
    active: int
    failed: int
    oldest: float  # seconds since the oldest of the backlog should have started
    failure_rate: float  # of what ended within the window, 0 to 1
    stalls: int = 0  # jobs that lost the worker that ran them, ever; where `count_stalls` counts them
    workers: int | None = None  # connected to this server, whatever their language; None: we may not ask

    @property
    def unattended(self) -> bool:
        """Jobs are there and no worker is. A paused queue is left to whoever paused it."""
        return self.workers == 0 and not self.paused and bool(self.backlog or self.active)

    @property
    def backlog(self) -> int:
        """Everything that should run and does not."""
        return self.waiting + self.prioritized + self.overdue


@dataclass(frozen=True, slots=True)
class Health:
    queues: list[QueueHealth]
    dead_letters: int  # not replayed yet
    memory: float | None = None  # share of what the server may use, 0 to 1; None: we may not ask

    def signals(self) -> dict[str, float]:
        """Flat names for rules and metrics: `documents.oldest`, `dead_letters`."""
        values: dict[str, float] = {"dead_letters": self.dead_letters}
        if self.memory is not None:
            values["redis.memory"] = self.memory
        for queue in self.queues:
            for name in ("backlog", "oldest", "failure_rate", "unattended", "workers"):
                if (value := getattr(queue, name)) is not None:
                    values[f"{queue.queue}.{name}"] = float(value)
        return values

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(queue), "backlog": queue.backlog, "unattended": queue.unattended} for queue in self.queues]
        return {"queues": rows, "dead_letters": self.dead_letters, "memory": self.memory}


CountDeadLetters = Callable[[float], Awaitable[tuple[int, Mapping[str, int]]]]


async def measure(
    redis: Redis,
    queues: Iterable[str],
    *,
    dead_letters: CountDeadLetters | None = None,
    window: float = WINDOW,
    prefix: str = "bull",
) -> Health:
    """`dead_letters` counts them: `dead_letter.counts(store)`. Without it only failures in Redis count."""
    names = list(queues)
    since = time.time() - window
    total, failures = await dead_letters(since) if dead_letters else (0, {})
    client: Any = redis  # redis-py types every answer as text or bytes; ours are decoded
    measured = [await _queue(client, name, f"{prefix}:{name}:", failures.get(name, 0), window) for name in names]
    connected = await _connected(client)
    if connected is not None:
        measured = [replace(queue, workers=_workers(connected, prefix, queue.queue)) for queue in measured]
    return Health(measured, total, await memory_used(redis))


def count_stalls(worker: Any, redis: Redis) -> None:
    """Count the stalled jobs that this worker finds, in Redis: for all processes, and longer than they live."""
    key = f"{worker.prefix}:{worker.name}:stalls"
    worker.on("stalled", lambda _job_id: redis.incr(key))


async def memory_used(redis: Redis) -> float | None:
    """The share in use of `maxmemory`, or of the machine's memory where there is none. At 1 every add is refused."""
    client: Any = redis
    try:
        memory = await client.info("memory")
    except NoPermissionError:
        return None
    limit = memory.get("maxmemory") or memory.get("total_system_memory")
    return float(memory["used_memory"]) / float(limit) if limit else None


async def _connected(redis: Any) -> Counter[str] | None:
    """How many connections have each name. None when the user of this connection may not list them."""
    try:
        return Counter(client["name"] for client in await redis.client_list())
    except NoPermissionError:
        return None


def _workers(connected: Counter[str], prefix: str, queue: str) -> int:
    """BullMQ names one connection per worker: in Node after the queue in base64, in Python after the queue, and
    `:w:` before a name of the worker's own. Ours has one of each, so that both see it: hence the larger count. The
    stock Python worker names every connection of its pool, so it counts for several; never for none."""
    counts = []
    for shown in (base64.b64encode(queue.encode()).decode(), queue):
        own = f"{prefix}:{shown}"
        named = (n for name, n in connected.items() if name == own or name.startswith(f"{own}:w:"))
        counts.append(sum(named))
    return max(counts)


async def _queue(redis: Any, name: str, base: str, dead: int, window: float) -> QueueHealth:
    now = time.time()
    due, since = int(now * 1000) * 0x1000, (now - window) * 1000
    async with redis.pipeline(transaction=False) as batch:
        batch.llen(f"{base}wait").zcard(f"{base}prioritized").zcard(f"{base}delayed")
        batch.zcount(f"{base}delayed", "-inf", due).llen(f"{base}paused").zcard(f"{base}waiting-children")
        batch.llen(f"{base}active").zcard(f"{base}failed").zcount(f"{base}failed", since, "+inf")
        batch.zcard(f"{base}completed").zcount(f"{base}completed", since, "+inf")
        batch.zrange(f"{base}completed", 0, 0, withscores=True)
        batch.zrange(f"{base}delayed", 0, 0, withscores=True)
        batch.lindex(f"{base}wait", -1).lindex(f"{base}paused", -1).hexists(f"{base}meta", "paused")
        batch.get(f"{base}stalls")
        counts = await batch.execute()
    wait, prioritized, delayed, overdue, aside, children, active, failed, failing = counts[:9]
    completed, completing, first_end, first_due, next_waiting, next_aside, stopped, stalls = counts[9:]
    candidates = [job for job in (next_waiting, next_aside) if job]
    candidates += await _first_of_each_priority(redis, f"{base}prioritized")
    ages = []
    for job in candidates:
        # An odd key, or a field that is not a number: nothing to tell its age by.
        with contextlib.suppress(ResponseError, ValueError, TypeError, AttributeError):
            ages.append(now - await _ready_since(redis, base + job))
    if overdue and first_due:
        ages.append(now - first_due[0][1] // 0x1000 / 1000)
    done = float(completing)
    if completed >= KEPT and completing == completed and first_end:
        # Retention cut the window short: extrapolate from the kept ones.
        done *= window / max(0.001, now - first_end[0][1] / 1000)
    bad = failing + dead
    rate = bad / (bad + done) if bad else 0.0
    oldest = max(0.0, *ages) if ages else 0.0
    # Older versions of BullMQ put the jobs of a paused queue aside, newer ones leave them where they are.
    states = (wait + aside, prioritized, delayed, overdue, bool(stopped), children, active, failed)
    return QueueHealth(name, *states, oldest, rate, int(stalls) if str(stalls).isdecimal() else 0)


async def _first_of_each_priority(redis: Any, key: str) -> list[str]:
    """The set is sorted by priority * 2**32 + arrival: hop from each priority's first job to the next's."""
    result: list[str] = []
    score: float = 0
    for _ in range(MOST_PRIORITIES):
        page = await redis.zrange(key, score, "+inf", byscore=True, offset=0, num=1, withscores=True)
        if not page:
            break
        result.append(page[0][0])
        score = (page[0][1] // 0x100000000 + 1) * 0x100000000
    return result


async def _ready_since(redis: Any, key: str) -> float:
    """When the job could first have started: due, back after an attempt, or its last child done."""
    added, processed, opts = await redis.hmget(key, "timestamp", "processedOn", "opts")
    if added is None:
        return time.time()  # it started while we looked
    moments = [float(added) + float((_parsed(opts) or {}).get("delay") or 0), float(processed or 0)]
    children = await redis.hkeys(f"{key}:processed")
    moments += [float(await redis.hget(child, "finishedOn") or 0) for child in children[-20:]]
    return max(moments) / 1000


async def problems(limit: float = 2.0, **parts: Callable[[], Awaitable[object]]) -> Mapping[str, str]:
    """What keeps this process from working, for a readiness probe: empty when every part answers in time.

    `await problems(redis=client.ping, database=lambda: ping(store))`
    """
    result: dict[str, str] = {}
    for name, ask in parts.items():
        try:
            async with asyncio.timeout(limit):
                await ask()
        except Exception as error:  # whatever it is, this part does not answer
            result[name] = type(error).__name__
    return result


def _parsed(value: str | None) -> Any:
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        return None
