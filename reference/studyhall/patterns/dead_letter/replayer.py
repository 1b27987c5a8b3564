"""Put a dead job back to work, under its own id.

Promise: the job runs again with its id, payload, signature, trace and flow as they were, and with fresh
attempts; its earlier failures stay in the archive. Redis is written first and the dead letter marked after
it: a crash in between can only lead to the same id being put back once more, never to a lost job or to two
of them.

When it does not hold
- A repeated replay of a job that meanwhile ran and left Redis runs it again. Its idempotency marker then
  returns the stored result, as long as markers are kept longer than dead letters.
- The rate cap of `replay_many` is per call: two people replaying at once add up.
- A parent whose children were replayed and finished before it was archived runs without their results in
  `getChildrenValues`; results that matter belong in the database.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, or_, update
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.errors import JobError, Permanent, QueueUnavailable, ResourceBusy
from ..core.store import begin
from .archive import DeadLetter, dead_letters, find, parsed, show

if TYPE_CHECKING:  # reading the archive needs neither of them
    from redis.asyncio import Redis

__all__ = [
    "AlreadyReplayed",
    "ChildrenFirst",
    "NotDeadLetter",
    "NothingToReplay",
    "ReplayRunning",
    "Replayed",
    "replay",
    "replay_many",
]

REPLAY_LEASE = 30.0  # seconds one replay of a dead letter keeps others away from it
# What the failed runs left. `ats` (starts) stays: a job that was started before looks for its checkpoint.
# `rjk` goes: with it the replay of a scheduled job would push its schedule forward.
_RUN_FIELDS = {"atm", "stc", "defa", "failedReason", "finishedOn", "processedOn", "progress", "rjk", "pb"}
_t = dead_letters.c


class NotDeadLetter(Permanent):
    """A job with this id is in the queue, so it is not dead. Wait until it ends, or purge the dead letter."""


class AlreadyReplayed(Permanent):
    """This dead letter was replayed before. If the job failed again it has a newer one: replay that."""


class NothingToReplay(Permanent):
    """The job's name, options or payload were lost before it was archived. Enqueue the work again."""


class ChildrenFirst(Permanent):
    """The job waits for children that are dead letters too. Replay those, the parent follows by itself."""


class ReplayRunning(ResourceBusy):
    """Somebody is replaying this dead letter right now, or was killed doing so. Try again in half a minute."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What `replay_many` did: job ids that were put back, and per dead letter why it was left out."""

    job_ids: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


async def replay(store: AsyncEngine, redis: "Redis", dead_letter_id: str, *, prefix: str = "bull") -> DeadLetter:
    """Put the job of this dead letter back into its queue."""
    dead_letter = (await show(store, dead_letter_id))[0]
    if not dead_letter.name or not isinstance(parsed(dead_letter.snapshot["fields"].get("opts")), dict):
        raise NothingToReplay(f"{dead_letter_id}: {NothingToReplay.__doc__}")
    if dead := [child.job_id for child in await _dead_children(store, dead_letter, prefix)]:
        raise ChildrenFirst(f"{dead_letter_id} waits for {', '.join(dead[:5])}: {ChildrenFirst.__doc__}")
    await _claim(store, dead_letter)
    try:
        # Else: replayed before, died again, never marked.
        if not await find(store, _t.replay_of == dead_letter.id):
            await _restore_parent(store, redis, dead_letter, prefix)
            await _restore(redis, dead_letter, prefix)
    except Exception as error:
        await _mark(store, dead_letter, replaying_until=None)  # what was written to Redis will be recognised
        from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

        if not isinstance(error, RedisError | OSError):
            raise
        why = f"{dead_letter_id} stays a dead letter: Redis did not take the job ({type(error).__name__})"  # no payload
        full_or_demoted = isinstance(error, OutOfMemoryError | ReadOnlyError | MasterDownError)
        if isinstance(error, ResponseError) and not full_or_demoted:
            raise Permanent(f"{why}. Look at what its key holds.") from None
        raise QueueUnavailable(f"{why}. Replay it again.") from None
    await _mark(store, dead_letter, replayed_at=time.time())
    return dead_letter


async def replay_many(
    store: AsyncEngine,
    redis: "Redis",
    ids: Sequence[str] | None = None,
    *,
    queue: str | None = None,
    name: str | None = None,
    per_second: float = 10.0,
    limit: int = 1000,
    prefix: str = "bull",
) -> Replayed:
    """Replay these, or the dead letters there are now, the oldest first, at most `per_second`: what broke under load
    should not get everything at once. Jobs that fail again meanwhile are left for the next call, and so is the rest
    when Redis is away."""
    wanted = [_t.replayed_at.is_(None), _t.archived_at <= time.time()]
    wanted += [_t.queue == queue] if queue else []
    wanted += [_t.name == name] if name else []
    if ids is None:
        ids = [letter.id for letter in await find(store, and_(*wanted), limit=limit, oldest_first=True)]
    chosen = list(dict.fromkeys(ids))
    done = Replayed()
    start = time.monotonic()
    for number, ident in enumerate(chosen):
        await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))
        try:
            done.job_ids.append((await replay(store, redis, ident, prefix=prefix)).job_id)
        except JobError as error:
            done.refused[ident] = str(error)
            if isinstance(error, QueueUnavailable):
                done.refused.update(dict.fromkeys(chosen[number + 1 :], "not tried: Redis was away"))
                break
    return done


async def _claim(store: AsyncEngine, dead_letter: DeadLetter) -> None:
    now = time.time()
    free = and_(_t.replayed_at.is_(None), or_(_t.replaying_until.is_(None), _t.replaying_until < now))
    claim = update(dead_letters).where(_t.id == dead_letter.id, free).values(replaying_until=now + REPLAY_LEASE)
    async with begin(store) as tx:
        if (await tx.execute(claim)).rowcount == 1:
            return
    if (await show(store, dead_letter.id))[0].replayed_at is not None:
        raise AlreadyReplayed(f"{dead_letter.id}: {AlreadyReplayed.__doc__}")
    raise ReplayRunning(f"{dead_letter.id}: {ReplayRunning.__doc__}", retry_after=REPLAY_LEASE)


async def _mark(store: AsyncEngine, dead_letter: DeadLetter, **values: Any) -> None:
    async with begin(store) as tx:
        await tx.execute(update(dead_letters).where(_t.id == dead_letter.id).values(**values))


async def _restore(redis: "Redis", dead_letter: DeadLetter, prefix: str, *, waits_for: Sequence[str] = ()) -> None:
    """Write the job as it was and let it wait for a worker, or for `waits_for`. All of it or nothing."""
    from bullmq import Queue
    from redis.exceptions import WatchError

    queue = Queue(dead_letter.queue, {"connection": redis, "prefix": prefix})
    keys, key = queue.keys, queue.toKey(dead_letter.job_id)
    fields = {k: v for k, v in dead_letter.snapshot["fields"].items() if k not in _RUN_FIELDS}
    now = int(time.time() * 1000)
    # A new timestamp: the time it lay dead must not count as its age. The old one stays in the archive.
    fields |= {"timestamp": now, "delay": 0, "replayOf": dead_letter.id}
    lifo = bool((parsed(fields["opts"]) or {}).get("lifo"))
    async with redis.pipeline(transaction=True) as pipe:
        await pipe.watch(key)
        if await pipe.exists(key):
            if await pipe.hget(key, "replayOf") == dead_letter.id:
                return  # an earlier replay of this dead letter got this far and was killed
            raise NotDeadLetter(f"{dead_letter.job_id}: {NotDeadLetter.__doc__}")
        pipe.multi()  # type: ignore[no-untyped-call]
        pipe.hset(key, mapping=fields)
        if processed := dead_letter.snapshot["processed"]:
            pipe.hset(f"{key}:processed", mapping=processed)
        if waits_for:
            pipe.sadd(f"{key}:dependencies", *waits_for)
            pipe.zadd(keys["waiting-children"], {dead_letter.job_id: now})
        else:
            # Dead again for the length of this MULTI, so that BullMQ's own script does the rest: priority,
            # paused queue, marker, event, and the tie to the parent.
            pipe.zadd(keys["failed"], {dead_letter.job_id: now})
            names = ("events", "failed", "wait", "meta", "active", "marker", "prioritized", "pc")
            arguments = [dead_letter.job_id, "RPUSH" if lifo else "LPUSH", "failedReason", "failed", "1", "0"]
            script = queue.scripts.commands["reprocessJob"]
            await script(keys=[key, *(keys[name] for name in names)], args=arguments, client=pipe)
        try:
            await pipe.execute()
        except WatchError:
            raise ReplayRunning(f"{dead_letter.id}: {ReplayRunning.__doc__}") from None


async def _restore_parent(store: AsyncEngine, redis: "Redis", dead_letter: DeadLetter, prefix: str) -> None:
    """A failed child took its parent along: let the parent wait for it again, and so on up."""
    parent = parsed(dead_letter.snapshot["fields"].get("parent"))
    if not isinstance(parent, dict):
        return
    queue, job_id = str(parent["queueKey"]).removeprefix(f"{prefix}:"), str(parent["id"])
    dead = await find(store, and_(_t.queue == queue, _t.job_id == job_id, _t.replayed_at.is_(None)), limit=1)
    if not dead or await redis.exists(f"{prefix}:{queue}:{job_id}"):
        return
    await _restore_parent(store, redis, dead[0], prefix)
    await _restore(redis, dead[0], prefix, waits_for=dead[0].snapshot["waits_for"])
    await _mark(store, dead[0], replayed_at=time.time())


async def _dead_children(store: AsyncEngine, dead_letter: DeadLetter, prefix: str) -> list[DeadLetter]:
    dead: list[DeadLetter] = []
    for key in dead_letter.snapshot["waits_for"]:
        queue, _, job_id = str(key).removeprefix(f"{prefix}:").partition(":")
        child = and_(_t.queue == queue, _t.job_id == job_id, _t.replayed_at.is_(None))
        dead += await find(store, child, limit=1)
    return dead
