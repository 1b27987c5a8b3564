"""Jobs that failed for good are kept, seen and replayable; none is forgotten.

Promise: every job in a queue's failed set (exhausted, unrecoverable, stalled out, malformed) becomes one
row in `dead_letters`, and only then leaves Redis. The row's id is made of queue, job id and time of
failure, so any number of sweepers may run, and be killed at any moment: the next one writes the same row or
finds it.

Why a sweep and not a listener: a `failed` listener that copies the job loses it when the process dies in
between, and in Python an async listener is never awaited. `attemptsMade >= attempts` misses unrecoverable and
stalled-out jobs. The failed set misses nothing.

When it does not hold
- `removeOnFail` that drops jobs before a sweep: with a count of 50, a burst of 1,000 failures leaves
  50. Keep failed jobs by age only, far longer than the sweep interval.
- An alert goes out at least once, always with the same dead letter id: a sweeper killed between sending and noting
  it leads to a second one. Let the receiver drop repeated ids.
- A foreign producer's id, name or data that is not UTF-8 is kept with its bytes written out (`\\xff`), and a replay
  runs under that readable id.
- A job that somebody retries by hand while it is being archived keeps its dead letter; replaying that says so.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.failures import clean_text
from ..core.store import begin, insert
from .archive import DeadLetter, dead_letter_of, dead_letters, parsed

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["Swept", "sweep"]

PAGE = 100  # jobs per transaction: listing a large failed set in one go blocks Redis for everybody
MOST_PER_SWEEP = 5_000  # per queue, so that one burst cannot keep the sweep from the other queues
ALERT_LEASE = 60.0  # seconds after which an alert that was begun and not noted is sent again
ALERT_SECONDS = 10.0  # for one alert to go out; far less than the lease
ALERTS_AT_ONCE = 20
ALERT_WINDOW = 24 * 3600.0  # switching alerts on must not send those of last year
MOST = 2**31 - 1  # what the column takes
# The clients decode every answer, and one id in the page that is not UTF-8 would keep all others from the archive.
RAW: dict[str, Any] = {"NEVER_DECODE": True}  # redis.client.NEVER_DECODE
STALLED = "job stalled more than allowable limit"  # BullMQ's words

Notify = Callable[[DeadLetter], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did. Failed alerts are tried again after `ALERT_LEASE` seconds."""

    archived: int = 0
    alerted: int = 0
    alerts_failed: int = 0


async def sweep(
    queue_names: Iterable[str], redis: "Redis", store: AsyncEngine, alert: Notify | None = None, *, prefix: str = "bull"
) -> Swept:
    """Archive what failed. Run it every few seconds, in as many processes as you like."""
    archived = 0
    client: Any = redis
    for queue in queue_names:
        for _ in range(MOST_PER_SWEEP // PAGE):
            # The oldest first. What was archived leaves the set, so the next page begins at 0 again.
            names = f"{prefix}:{queue}:failed", 0, PAGE - 1, "WITHSCORES"
            page: Any = await client.execute_command("ZRANGE", *names, withscores=True, **RAW)
            if not page:
                break
            archived += await _archive(queue, f"{prefix}:{queue}:", page, client, store)
    if alert is None:
        return Swept(archived)
    sent: list[bool] = []
    while claimed := await _claim_alerts(store):
        went_out = await asyncio.gather(*(_send(dead_letter, alert, store) for dead_letter in claimed))
        sent += went_out
        if not all(went_out) or len(sent) >= PAGE:  # a pager that is down must not hold up the sweep
            break
    return Swept(archived, alerted=sum(sent), alerts_failed=len(sent) - sum(sent))


# Reads each job only if it is still dead since `score`: one retried meanwhile is not a dead letter.
_READ = """
local found = {}
for i = 2, #ARGV, 2 do
  local key = ARGV[1] .. ARGV[i]
  if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or -1) ~= tonumber(ARGV[i + 1]) then
    found[#found + 1] = false
  elseif redis.call('TYPE', key).ok ~= 'hash' then
    found[#found + 1] = {{}, {}, {}, {}}
  else
    local waits_for = redis.call('SMEMBERS', key .. ':dependencies')
    for _, child in ipairs(redis.call('ZRANGE', key .. ':unsuccessful', 0, -1)) do
      waits_for[#waits_for + 1] = child
    end
    found[#found + 1] = {redis.call('HGETALL', key), redis.call('LRANGE', key .. ':logs', -50, -1),
                         redis.call('HGETALL', key .. ':processed'), waits_for}
  end
end
return found
"""

# BullMQ's own remove also takes a job that was retried a moment ago, and lets a waiting parent go on without this
# child. The look for `data` protects the queue's own keys from a forged job id.
_REMOVE = """
for i = 2, #ARGV, 2 do
  local key = ARGV[1] .. ARGV[i]
  if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or -1) == tonumber(ARGV[i + 1]) then
    redis.call('ZREM', KEYS[1], ARGV[i])
    if redis.call('TYPE', key).ok == 'hash' and redis.call('HEXISTS', key, 'data') == 1 then
      redis.call('DEL', key, key .. ':logs', key .. ':dependencies', key .. ':processed', key .. ':failed',
                 key .. ':unsuccessful')
    end
  end
end
"""


async def _archive(queue: str, base: str, page: Sequence[tuple[bytes, float]], redis: Any, store: AsyncEngine) -> int:
    dead = [part for job_id, score in page for part in (job_id, _text(score))]
    jobs: Any = await redis.execute_command("EVAL", _READ, 1, f"{base}failed", base, *dead, **RAW)
    rows = [
        _row(queue, _readable(job_id), score, _readable(raw))
        for (job_id, score), raw in zip(page, jobs, strict=True)
        if raw
    ]
    if not rows:
        return 0
    write = insert(store, dead_letters).on_conflict_do_nothing().returning(dead_letters.c.id)
    async with begin(store) as tx:
        new = len((await tx.execute(write, sorted(rows, key=lambda row: str(row["id"])))).all())
    await redis.eval(_REMOVE, 1, f"{base}failed", base, *dead)  # committed: now they may leave Redis
    return new


def _row(queue: str, job_id: str, score: float, raw: Sequence[Sequence[str]]) -> dict[str, Any]:
    fields, processed = _pairs(raw[0]), _pairs(raw[2])
    snapshot = {"fields": fields, "logs": raw[1], "processed": processed, "waits_for": raw[3]}
    attempts_made = _number(fields.get("atm"), 0)
    reason = fields.get("failedReason") or "the job's data is missing from Redis"
    return {
        "id": hashlib.sha256(json.dumps([queue, job_id, _text(score)]).encode()).hexdigest()[:32],
        "queue": queue,
        "job_id": job_id.replace("\0", "?"),  # PostgreSQL refuses it in text, and one bad row would stop all
        "name": clean_text(fields.get("name", "")),
        "cause": _cause(fields, attempts_made, reason),
        "reason": clean_text(reason),
        "attempts_made": attempts_made,
        "failed_at": score / 1000,
        "archived_at": time.time(),
        "replay_of": clean_text(fields["replayOf"]) if "replayOf" in fields else None,
        "snapshot": json.dumps(snapshot),
    }


def _cause(fields: dict[str, str], attempts_made: int, reason: str) -> str:
    """A label for people; nothing is decided by it."""
    opts = parsed(fields.get("opts"))
    if not isinstance(opts, dict) or "name" not in fields or parsed(fields.get("data")) is None:
        return "malformed"
    if reason == STALLED:
        return "stalled"
    if reason.startswith("ForgedJob: "):
        return "forged"
    return "exhausted" if attempts_made >= _number(opts.get("attempts"), 1) else "unrecoverable"


async def _claim_alerts(store: AsyncEngine) -> list[DeadLetter]:
    now, t = time.time(), dead_letters.c
    free = or_(t.alerting_until.is_(None), t.alerting_until < now)
    due = and_(t.alerted_at.is_(None), t.archived_at > now - ALERT_WINDOW, free)
    oldest = select(t.id).where(due).order_by(t.archived_at).limit(ALERTS_AT_ONCE)
    # A CTE: PostgreSQL may run a sub-select with SKIP LOCKED more than once and so exceed its LIMIT (27 rows
    # for 20). The condition again outside: it is what gets rechecked after waiting for another sweeper.
    locked = oldest.with_for_update(skip_locked=True).cte("due")
    claim = update(dead_letters).where(t.id.in_(select(locked.c.id)), due)
    claim = claim.values(alerting_until=now + ALERT_LEASE)
    async with begin(store) as tx:
        return [dead_letter_of(row) for row in await tx.execute(claim.returning(*t))]


async def _send(dead_letter: DeadLetter, alert: Notify, store: AsyncEngine) -> bool:
    try:
        async with asyncio.timeout(ALERT_SECONDS):
            await alert(dead_letter)
    except Exception:  # the pager is down: the dead letter is safe, and the alert comes again after the lease
        return False
    this = dead_letters.c.id == dead_letter.id
    async with begin(store) as tx:
        await tx.execute(update(dead_letters).where(this).values(alerted_at=time.time()))
    return True


def _readable(raw: Any) -> Any:
    """The text of an answer that was not decoded, its invalid bytes written out."""
    if isinstance(raw, list):
        return [_readable(item) for item in raw]
    return raw.decode(errors="backslashreplace") if isinstance(raw, bytes) else raw


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _text(score: float) -> str:
    return f"{score:.17g}"


def _number(value: Any, otherwise: int) -> int:
    try:
        return max(-MOST, min(MOST, int(value or otherwise)))
    except (TypeError, ValueError, OverflowError):
        return otherwise
