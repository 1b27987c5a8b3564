"""Faults of senders: the same job twice or many times at once, impossible and unreadable jobs, long silence."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from queuesmith.prove.spec import Request, Spec, Wrong

from .fault import fault, half, over

if TYPE_CHECKING:
    from queuesmith.prove.world import Batch, World

SILENCE = 40


@fault("twice", "the same request twice: at once, and again after its effect", quick=True, cost=5)
def twice(world: World, batch: Batch) -> None:
    jobs = world.new_jobs(batch, half(world))
    at_once, after = jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]
    world.submit([*at_once, *at_once, *after])
    world.settle(batch, world.patience)
    world.submit(after)
    batch.hits.append(f"{len(jobs)} requests, each sent twice")
    over(world, batch)


@fault("burst", "the same request many times at once", quick=True)
def burst(world: World, batch: Batch) -> None:
    # Each process takes a second of CPU.
    times = 6 if world.quick and not isinstance(world.spec.service.submit, Request) else 20
    world.submit(world.new_jobs(batch, 1) * times, one_by_one=times)
    batch.hits.append(f"{times} equal requests")
    over(world, batch)


def _failing(spec: Spec) -> str:
    return "" if spec.service.failing else "needs `failing` in [service]: how to send a job that cannot succeed"


@fault("failing", "jobs that cannot succeed must end as visible failures", _failing, may_fail=True, quick=True)
def failing(world: World, batch: Batch) -> None:
    world.submit(world.new_jobs(batch, 2, "failed"), world.spec.service.failing)
    world.submit(world.new_jobs(batch, 2))
    batch.hits.append("2 jobs sent")
    over(world, batch)


def _foreign(spec: Spec) -> str:
    known = spec.service.foreign or (spec.service.queue and spec.redis)
    return "" if known else "needs `queue` (of BullMQ), or `foreign`: how to put there what nobody can read"


@fault("foreign", "jobs on the queue that nobody can read: no data, broken JSON, an unknown name", _foreign)
def foreign(world: World, batch: Batch) -> None:
    if (command := world.spec.service.foreign) is not None:
        code, output = world.run(command, 60)
        if code:
            raise Wrong(f"`foreign` failed with {code}{world.spec.line('service.foreign')}: {output[-600:]}")
        world.timeline.add("fault", f"{command}")
        world.submit(world.new_jobs(batch, half(world)))
        batch.hits.append("what `foreign` put there")
        over(world, batch)
        return
    assert world.redis is not None
    base = f"{world.spec.service.prefix}:{world.spec.service.queue}"
    common = {"opts": "{}", "timestamp": str(int(time.time() * 1000)), "delay": "0", "priority": "0"}
    jobs = [("", "{}"), ("nobody-knows-this", '{"a": 1}'), ("x", "{broken"), ("x", "null")]
    with world.redis.client() as client:
        for number, (name, data) in enumerate(jobs):
            client.hset(f"{base}:foreign-{number}", mapping={"name": name, "data": data, **common})
            client.lpush(f"{base}:wait", f"foreign-{number}")
            client.zadd(f"{base}:marker", {"0": 0})
        world.timeline.add("fault", f"{len(jobs)} foreign jobs put on the queue")
        world.submit(world.new_jobs(batch, half(world)))
        gone = world.until(lambda: not client.llen(f"{base}:wait"), 10, 0.05)
    batch.hits.append(f"{len(jobs)} foreign jobs, {'all' if gone else 'not all'} fetched")
    over(world, batch)


@fault("quiet", f"nothing to do for {SILENCE} s, then one job", cost=SILENCE + 5)
def quiet(world: World, batch: Batch) -> None:
    world.wait_aside(SILENCE * world.scale)
    promised = world.spec.promises.wake
    first = world.new_jobs(batch, 1)[0]
    world.submit([first])
    over(world, batch, settle=True)
    second = world.new_jobs(batch, 1)[0]  # takes as long, less what the silence cost
    world.submit([second])
    world.settle(batch, world.patience)
    batch.hits.append(f"{SILENCE * world.scale:g} s of silence")
    if first.seen and second.seen:
        took, usual = (max(0.0, job.seen[0] - job.at) for job in (first, second))  # it may be done before submit ends
        batch.facts.append(f"done after {took:.1f} s, the next one after {usual:.1f} s")
        if took - usual > promised:
            batch.broke(
                "wake",
                f"the job after the silence was done after {took:.1f} s and the next one after {usual:.1f} s, promised "
                f"{promised:g} s more at most",
            )
