"""Put a dead job back to work, under its own id.

Promise: the job runs again with its id, payload, signature, trace and flow as they were, and with fresh
attempts; what it suffered before stays in the archive. Redis is written first and the letter marked after
it: a crash in between can only lead to the same id being put back once more, never to a lost job or to two
of them.

When it does not hold
- A repeated replay of a job that meanwhile ran and left Redis runs it again. Its idempotency marker then
  returns the stored result, as long as markers are kept longer than letters.
- The rate cap of `replay_many` is per call: two people replaying at once add up.
- A parent whose children were replayed and finished before it was archived runs without their results in
  `getChildrenValues`; results that matter belong into the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bullmq import Queue
from redis.asyncio import Redis
from redis.exceptions import WatchError
from sqlalchemy import and_, or_, update
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.errors import JobError, Permanent, ResourceBusy
from ..core.store import begin
from .archive import DeadLetter, dead_letters, find, parsed, show

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

REPLAY_LEASE = 30.0  # seconds one replay of a letter keeps others away from it
# What the last life left. `ats` (starts) stays: a job that was started before looks for its checkpoint.
# `rjk` goes: with it the replay of a scheduled job would push its schedule forward.
_OF_THE_LAST_LIFE = {
    "atm",
    "stc",
    "defa",
    "failedReason",
    "finishedOn",
    "processedOn",
    "progress",
    "rjk",
    "pb",
}
_t = dead_letters.c


class NotDeadLetter(Permanent):
    """A job with this id is in the queue, so it is not dead. Wait until it ends, or purge the letter."""


class AlreadyReplayed(Permanent):
    """This letter was replayed before. If the job died again it has a newer letter: replay that."""


class NothingToReplay(Permanent):
    """The job's name, options or payload were lost before it was archived. Enqueue the work anew."""


class ChildrenFirst(Permanent):
    """The job waits for children that are dead letters too. Replay those, the parent follows by itself."""


class ReplayRunning(ResourceBusy):
    """Somebody is replaying this letter right now, or was killed doing so. Try again in half a minute."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What `replay_many` did: job ids that were put back, and per letter id why it was left out."""

    job_ids: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


async def replay(engine: AsyncEngine, redis: Redis, letter_id: str, *, prefix: str = "bull") -> DeadLetter:
    """Put the job of this letter back into its queue."""
    letter = (await show(engine, letter_id))[0]
    if not letter.name or not isinstance(parsed(letter.snapshot["fields"].get("opts")), dict):
        raise NothingToReplay(f"{letter_id}: {NothingToReplay.__doc__}")
    if dead := [child.job_id for child in await _dead_children(engine, letter, prefix)]:
        raise ChildrenFirst(f"{letter_id} waits for {', '.join(dead[:5])}: {ChildrenFirst.__doc__}")
    await _claim(engine, letter)
    try:
        if not await find(
            engine, _t.replay_of == letter.id
        ):  # else: replayed before, died again, never marked
            await _restore_parent(engine, redis, letter, prefix)
            await _restore(redis, letter, prefix)
    except Exception:
        await _mark(engine, letter, replaying_until=None)  # what was written to Redis will be recognised
        raise
    await _mark(engine, letter, replayed_at=time.time())
    return letter


async def replay_many(
    engine: AsyncEngine,
    redis: Redis,
    *,
    queue: str | None = None,
    name: str | None = None,
    per_second: float = 10.0,
    limit: int = 1000,
    prefix: str = "bull",
) -> Replayed:
    """Replay the letters there are now, the oldest first, at most `per_second`: what broke under load before
    should not get everything at once. Letters of jobs that die again meanwhile are left for the next call."""
    wanted = [_t.replayed_at.is_(None), _t.archived_at <= time.time()]
    wanted += [_t.queue == queue] if queue else []
    wanted += [_t.name == name] if name else []
    letters = await find(engine, and_(*wanted), limit=limit, oldest_first=True)
    done = Replayed()
    start = time.monotonic()
    for number, letter in enumerate(letters):
        await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))
        try:
            await replay(engine, redis, letter.id, prefix=prefix)
            done.job_ids.append(letter.job_id)
        except JobError as error:
            done.refused[letter.id] = str(error)
    return done


async def _claim(engine: AsyncEngine, letter: DeadLetter) -> None:
    now = time.time()
    free = and_(_t.replayed_at.is_(None), or_(_t.replaying_until.is_(None), _t.replaying_until < now))
    claim = update(dead_letters).where(_t.id == letter.id, free).values(replaying_until=now + REPLAY_LEASE)
    async with begin(engine) as tx:
        if (await tx.execute(claim)).rowcount == 1:
            return
    if (await show(engine, letter.id))[0].replayed_at is not None:
        raise AlreadyReplayed(f"{letter.id}: {AlreadyReplayed.__doc__}")
    raise ReplayRunning(f"{letter.id}: {ReplayRunning.__doc__}", retry_after=REPLAY_LEASE)


async def _mark(engine: AsyncEngine, letter: DeadLetter, **values: Any) -> None:
    async with begin(engine) as tx:
        await tx.execute(update(dead_letters).where(_t.id == letter.id).values(**values))


async def _restore(redis: Redis, letter: DeadLetter, prefix: str, *, waits_for: Sequence[str] = ()) -> None:
    """Write the job as it was and let it wait for a worker, or for `waits_for`. All of it or nothing."""
    queue = Queue(letter.queue, {"connection": redis, "prefix": prefix})
    keys, key = queue.keys, queue.toKey(letter.job_id)
    fields = {k: v for k, v in letter.snapshot["fields"].items() if k not in _OF_THE_LAST_LIFE}
    now = int(time.time() * 1000)
    # A new timestamp: the time it lay dead must not count as its age. The old one stays in the archive.
    fields |= {"timestamp": now, "delay": 0, "replayOf": letter.id}
    lifo = bool((parsed(fields["opts"]) or {}).get("lifo"))
    async with redis.pipeline(transaction=True) as pipe:
        await pipe.watch(key)
        if await pipe.exists(key):
            if await pipe.hget(key, "replayOf") == letter.id:
                return  # an earlier replay of this letter got this far and was killed
            raise NotDeadLetter(f"{letter.job_id}: {NotDeadLetter.__doc__}")
        pipe.multi()  # type: ignore[no-untyped-call]
        pipe.hset(key, mapping=fields)
        if processed := letter.snapshot["processed"]:
            pipe.hset(f"{key}:processed", mapping=processed)
        if waits_for:
            pipe.sadd(f"{key}:dependencies", *waits_for)
            pipe.zadd(keys["waiting-children"], {letter.job_id: now})
        else:
            # Dead again for the length of this MULTI, so that BullMQ's own script does the rest: priority,
            # paused queue, marker, event, and the tie to the parent.
            pipe.zadd(keys["failed"], {letter.job_id: now})
            names = ("events", "failed", "wait", "meta", "active", "marker", "prioritized", "pc")
            arguments = [letter.job_id, "RPUSH" if lifo else "LPUSH", "failedReason", "failed", "1", "0"]
            script = queue.scripts.commands["reprocessJob"]
            await script(keys=[key, *(keys[name] for name in names)], args=arguments, client=pipe)
        try:
            await pipe.execute()
        except WatchError:
            raise ReplayRunning(f"{letter.id}: {ReplayRunning.__doc__}") from None


async def _restore_parent(engine: AsyncEngine, redis: Redis, letter: DeadLetter, prefix: str) -> None:
    """A child that failed took its parent along: let that wait for it again, and its own parent too."""
    parent = parsed(letter.snapshot["fields"].get("parent"))
    if not isinstance(parent, dict):
        return
    queue, job_id = str(parent["queueKey"]).removeprefix(f"{prefix}:"), str(parent["id"])
    dead = await find(engine, and_(_t.queue == queue, _t.job_id == job_id, _t.replayed_at.is_(None)), limit=1)
    if not dead or await redis.exists(f"{prefix}:{queue}:{job_id}"):
        return
    await _restore_parent(engine, redis, dead[0], prefix)
    await _restore(redis, dead[0], prefix, waits_for=dead[0].snapshot["waits_for"])
    await _mark(engine, dead[0], replayed_at=time.time())


async def _dead_children(engine: AsyncEngine, letter: DeadLetter, prefix: str) -> list[DeadLetter]:
    dead: list[DeadLetter] = []
    for key in letter.snapshot["waits_for"]:
        queue, _, job_id = str(key).removeprefix(f"{prefix}:").partition(":")
        child = and_(_t.queue == queue, _t.job_id == job_id, _t.replayed_at.is_(None))
        dead += await find(engine, child, limit=1)
    return dead
