"""BullMQ's job scheduler on the Redis server's clock, with BullMQ's own scripts.

Promise: the next tick is a slot after `now`, which the caller takes from the server. bullmq's own
`JobScheduler` takes the clock of whichever process calls it: a worker an hour ahead moved the next tick by an
hour, and the whole fleet waited for it.
It does not hold for ticks that a stock worker starts: it plans the next one by its own clock.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgpack
from bullmq.job import Job
from bullmq.job_scheduler import default_repeat_strategy

__all__ = ["add", "advance"]

# In the order in which BullMQ's scripts expect them.
_KEYS = ("repeat", "delayed", "wait", "paused", "meta", "prioritized", "marker", "id", "events", "pc")


async def add(
    queue: Any,
    scheduler: str,
    slot: int,
    name: str,
    data: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    repeat: Mapping[str, Any],
    now: int,
) -> None:
    """Let `scheduler` make its next job at `slot`; one waiting by an earlier definition is replaced."""
    scripts = queue.backend.scripts
    repeat = {**repeat, "startDate": slot} if "every" in repeat else dict(repeat)
    job_options = _next_options(options, {**repeat, "count": 1}, scheduler, slot, now)
    args = [
        slot,
        msgpack.packb({"name": name, **repeat}),
        scheduler,
        json.dumps(data, separators=(",", ":"), allow_nan=False),
        msgpack.packb(scripts.encodeOpts(dict(options))),
        msgpack.packb(scripts.encodeOpts(job_options)),
        now,
        scripts.keys[""],
        "",
    ]
    keys = [scripts.keys[key] for key in (*_KEYS, "active")]
    code = await scripts.commands["addJobScheduler"](keys=keys, args=args)
    if isinstance(code, int) and code < 0:
        raise scripts.finishedErrors({"code": code, "command": "addJobScheduler"})


async def advance(backend: Any, job: Job, now: int) -> None:
    """Plan the next tick when one starts; a second call for the same tick changes nothing."""
    scripts, repeat = backend.scripts, dict(job.opts.get("repeat") or {})
    count, limit, end = repeat.get("count", 0) + 1, repeat.get("limit"), repeat.get("endDate")
    if (limit is not None and count > limit) or (end is not None and now > end):
        return
    slot = now  # for an interval the script computes the slot
    if repeat.get("pattern"):
        after = max(now, job.opts.get("prevMillis") or 0)
        slot = default_repeat_strategy(after, repeat)
    options = _next_options(job.opts, {**repeat, "count": count}, job.repeatJobKey, slot, now)
    producer = scripts.toKey(job.id)
    keys = [*(scripts.keys[key] for key in _KEYS), producer, scripts.keys["active"]]
    packed = msgpack.packb(scripts.encodeOpts(options))
    args = [slot, job.repeatJobKey, json.dumps(job.data), packed, now, scripts.keys[""], job.id]
    await scripts.commands["updateJobScheduler"](keys=keys, args=args)


def _next_options(
    options: Mapping[str, Any], repeat: Mapping[str, Any], scheduler: str | None, slot: int, now: int
) -> dict[str, Any]:
    more = {"delay": max(0, slot - now), "timestamp": now, "prevMillis": slot, "repeatJobKey": scheduler}
    return {**options, **more, "repeat": dict(repeat), "jobId": f"repeat:{scheduler}:{slot}"}
