"""What must hold under every fault, and whether it did."""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import probes
from .processes import marked

if TYPE_CHECKING:
    from .faults import Fault
    from .world import Batch, Job, World

# Why a fault that could have been run was not, or was not watched for this many seconds.
TIME_UP, LOOKED = "time was up", 5.0

INVARIANTS = {
    "lost": "nothing that was taken is lost",
    "duplicated": "nothing takes effect twice",
    "stuck": "nothing hangs longer than the promised recovery",
    "gave up": "no job fails because of this fault",
    "invisible failure": "every failure can be seen, with a reason",
    "shutdown": "SIGTERM ends it in time, with exit code 0",
    "enqueue": "a submit answers in time, even without Redis",
    "wake": "a job after a silence starts in time",
    "poison": "a job that kills its worker is given up after a few",
    "hot loop": "no hammering of a provider",
    "retry-after": "Retry-After is kept",
    "leak": "no payload and no secret in the logs",
    "left behind": "no process and no listener outlives the service",
    "memory": "memory stays flat",
}
# What to read, by invariant: patterns of the catalogue.
READ = {
    "lost": ("bullmq-worker", "retry", "outbox"),
    "duplicated": ("idempotency",),
    "stuck": ("bullmq-worker", "stall-budget"),
    "gave up": ("retry", "stall-budget"),
    "invisible failure": ("dead-letter",),
    "shutdown": ("shutdown",),
    "enqueue": ("producer", "degraded"),
    "wake": ("bullmq-worker",),
    "poison": ("stall-budget", "isolation"),
    "hot loop": ("retry", "circuit-breaker"),
    "retry-after": ("retry", "rate-limit"),
    "leak": ("observability",),
    "left behind": ("shutdown", "parent-death"),
    "memory": ("health",),
}
# Those about BullMQ for Python: for another stack, its own page replaces them.
OWN = {"bullmq-worker", "stall-budget", "producer", "degraded", "isolation", "parent-death", "shutdown", "health"}


@dataclass
class Broken:
    invariant: str
    measured: str
    story: str = ""


@dataclass
class Row:
    """A line of the card. `verdict`: held, broken, hit nothing, unclear, not run."""

    fault: str
    does: str
    verdict: str
    measured: str
    broken: list[Broken] = field(default_factory=list)


def judge(world: World, batch: Batch, fault: Fault) -> Row:
    """One fault. Called when the run is over: a duplicate may come late."""
    jobs = batch.expected()
    broken = [Broken(name, measured) for name, measured in batch.broken]
    broken += _duplicated(world, batch)
    missing = [job for job in jobs if not job.count and job.expects == "done"]
    unclear = ""
    watched = batch.watched - batch.over
    promised = world.spec.promises.recovery + world.warmup
    if missing and not batch.broken and watched < promised * 0.95 and not _all_failed(missing):
        unclear = (
            f"{len(missing)} not done when the run's time was up, {watched:.0f} s after the fault, promised "
            f"{world.spec.promises.recovery:g} s"
        )
    else:
        broken += _not_done(world, missing, fault)
        broken += _late(world, jobs)
    again = {key: place for key, place in batch.queued.items() if batch.jobs[key].count}
    if again:
        key, place = next(iter(again.items()))
        text = f"{len(again)} done, and still on the queue after {watched:.0f} s ({place}): they will run again"
        # Another system may keep what it retried: only for these two do we know what a job there means.
        if watched >= promised and ("BullMQ" in place or "unacked" in place):
            broken.append(Broken("stuck", text, world.timeline.story(key)))
        else:
            unclear = unclear or text
    if world.spec.effect.kind == "provider":
        asked = [world.providers[name] for name in world.spec.effect.target.split()]
        deaf = [
            job
            for job in jobs
            if job.count and not job.reason and any(provider.unanswered(job.key) for provider in asked)
        ]
        if deaf:
            unclear = unclear or (
                f"{len(deaf)} done at the provider, whose answer never came, and nobody has asked again "
                f"after {watched:.0f} s: given up, or still to be duplicated"
            )
    silent = [job for job in jobs if job.expects == "failed" and not job.reason]
    if silent:
        what = "took effect" if silent[0].count else "is nowhere to be seen as failed"
        broken.append(
            Broken(
                "invisible failure",
                f"{len(silent)} of {sum(job.expects == 'failed' for job in jobs)} that had to fail: {what}",
                world.timeline.story(silent[0].key),
            )
        )
    broken += _retry_after(world, batch)
    measured = _measured(world, batch, jobs)
    if broken:
        return Row(fault.name, fault.does, "broken", measured, broken)
    if not batch.hits or not jobs:
        why = (
            batch.unhit or "no job was open when it came (more `jobs`, or slower ones, help)"
            if jobs
            else f"no job was taken: {_refusal(batch)}"
        )
        return Row(fault.name, fault.does, "hit nothing", f"{why}; {measured}")
    if unclear and watched < LOOKED and missing:
        # It was hit, but not watched for recovery.
        return Row(fault.name, fault.does, "not run", TIME_UP)
    if unclear:
        return Row(fault.name, fault.does, "unclear", unclear)
    return Row(fault.name, fault.does, "held", measured)


def judge_whole(worlds: Sequence[World], soak: bool) -> list[Row]:
    """What holds over the whole run, not under one fault."""
    spec, rows = worlds[0].spec, []
    if spec.providers:
        rows.append(_hot_loops(worlds))
    if spec.says("{canary}"):
        lines = [line for world in worlds for line in world.service.lines]
        leaks = [f"{source}: {line[:160]}" for _, source, line in lines if worlds[0].canary in line]
        broken = [Broken("leak", f"{len(leaks)} log lines hold it", leaks[0])] if leaks else []
        rows.append(_row("leak", f"{len(lines)} log lines read", broken))
    left = [command for world in worlds for command in world.left.values()]
    broken = [Broken("left behind", f"{len(left)} are left", "; ".join(left[:3]))] if left else []
    rows.append(_row("left behind", f"{len(left)} are left" if left else "none is left", broken))
    if soak:
        rows.append(_memory(worlds[0]))
    return rows


def _row(invariant: str, measured: str, broken: list[Broken]) -> Row:
    return Row(invariant, INVARIANTS[invariant], "broken" if broken else "held", measured, broken)


def _measured(world: World, batch: Batch, jobs: list[Job]) -> str:
    done = sum(bool(job.count) for job in jobs if job.expects == "done")
    parts = [f"hit {batch.hits[0]}"] if batch.hits and batch.fault != "none" else []
    parts.append(f"{done} of {sum(job.expects == 'done' for job in jobs)} done")
    if failed := [job for job in jobs if job.reason]:
        parts.append(f"{len(failed)} failed visibly")
    if refused := sum(job.refused and not job.accepted for job in batch.jobs.values()):
        parts.append(f"{refused} refused")
    if (recovered := _recovery(jobs)) >= 0.05:
        limit = world.spec.promises.recovery
        allowed = f" (limit {limit:g} s + {world.warmup:.1f} s, its start)" if recovered > limit else ""
        parts.append(f"recovered in {recovered:.1f} s{allowed}")
    return ", ".join([*parts, *batch.facts])


def _recovery(jobs: list[Job]) -> float:
    """Until the last one was done, from the end of the fault or from its own submission, whichever was later."""
    waits = [job.seen[0] - max(job.over, job.at) for job in jobs if job.seen and job.expects == "done"]
    return max(0.0, max(waits, default=0.0))


def _duplicated(world: World, batch: Batch) -> list[Broken]:
    """In the effect itself, and at every provider."""
    promise = world.spec.promises.duplicates
    if promise == "allowed":
        return []
    duplicates: dict[str, str] = {}
    for key, job in batch.jobs.items():
        for provider in world.providers.values():
            calls = provider.effects(key)
            for effect in {(str(call.route), call.thing) for call in calls}:
                made = [call for call in calls if (str(call.route), call.thing) == effect]
                keys = {call.idempotency for call in made}
                if len(made) > 1 and not (promise == "same key" and len(keys) == 1 and "" not in keys):
                    under = (
                        "without a key"
                        if keys == {""}
                        else f"under {len(keys)} keys"
                        if len(keys) > 1
                        else "under one key"
                    )
                    duplicates[key] = f"{made[0].line.split()[0]} at {provider.name} {len(made)} times, {under}"
        if (
            job.count > 1
            and key not in duplicates
            and not (promise == "same key" and world.spec.effect.kind == "provider")
        ):
            duplicates[key] = f"{job.count} times"
    if not duplicates:
        return []
    first = next(iter(duplicates))
    return [
        Broken(
            "duplicated",
            f"{len(duplicates)} of {len(batch.jobs)} duplicated ({duplicates[first]})",
            world.timeline.story(first),
        )
    ]


def _not_done(world: World, missing: list[Job], fault: Fault) -> list[Broken]:
    if not missing:
        return []
    visible = [job for job in missing if job.reason]
    silent = {job.key: job for job in missing if not job.reason}
    completed = _completed(world, set(silent))
    open_keys = set(silent) - completed
    waiting = {key: places[0] for key, places in _in_redis(world, open_keys).items()}
    logged = world.in_logs(open_keys - set(waiting))
    lost = [silent[key] for key in silent if key in open_keys and key not in waiting and key not in logged]
    allowed = world.spec.promises.failed == "visible" or fault.may_fail
    broken = []
    if visible and not allowed:
        broken.append(
            Broken("gave up", f"{len(visible)} failed: {visible[0].reason[:100]}", world.timeline.story(visible[0].key))
        )
    if logged and not allowed:
        key = next(iter(logged))
        broken.append(
            Broken("gave up", f"{len(logged)} failed, seen only in the logs: {logged[key]}", world.timeline.story(key))
        )
    if waiting:
        key = next(iter(waiting))
        place = waiting[key] + probes.due(world, key, waiting[key])
        broken.append(Broken("stuck", f"{len(waiting)} still in Redis ({place})", world.timeline.story(key)))
    if completed:
        broken.append(
            Broken(
                "lost",
                f"{len(completed)} completed without their effect: nobody will try again (an error that was caught?)",
                world.timeline.story(min(completed)),
            )
        )
    if lost:
        broken.append(
            Broken("lost", f"{len(lost)} taken and never done, no trace of them", world.timeline.story(lost[0].key))
        )
    return broken


def _completed(world: World, keys: set[str]) -> set[str]:
    try:
        states = probes.bullmq_states(world, keys)
    except Exception:  # as below
        return set()
    return {key for key, (state, _) in states.items() if state == "completed"}


def _in_redis(world: World, keys: set[str]) -> dict[str, list[str]]:
    try:
        return probes.in_redis(world, keys)
    except Exception:  # a server that does not answer says nothing
        return {}


def _late(world: World, jobs: list[Job]) -> list[Broken]:
    """By the last look that found nothing: looks can be 15 s apart on a crowded machine."""
    promised = world.spec.promises.recovery
    waits = {job.key: job.unseen - max(job.over, job.at) for job in jobs if job.seen and job.expects == "done"}
    slow = max(waits, key=waits.__getitem__, default="")
    if not slow or waits[slow] <= promised + world.warmup:
        return []
    measured = f"recovered after {_recovery(jobs):.0f} s, promised {promised:g} s"
    return [Broken("stuck", measured, world.timeline.story(slow))]


def _all_failed(jobs: list[Job]) -> bool:
    return all(job.reason for job in jobs)


def _refusal(batch: Batch) -> str:
    return next((job.said.strip()[-120:] for job in batch.jobs.values() if job.said), "nothing was sent")


def _retry_after(world: World, batch: Batch) -> list[Broken]:
    early: list[tuple[float, float, str]] = []
    for provider in world.providers.values():
        due: dict[str, tuple[float, float]] = {}
        for call in sorted(provider.calls, key=lambda call: call.at):
            if call.key in batch.jobs and call.route:
                if call.key in due and call.at < due[call.key][0] - 0.1:
                    at, wait = due[call.key]
                    early.append((wait - (at - call.at), wait, call.key))
                due.pop(call.key, None)
                if call.answer in ("429", "503"):
                    due[call.key] = (call.done_at + call.route.retry_after, call.route.retry_after)
    if not early:
        return []
    came, wait, key = min(early)
    return [
        Broken(
            "retry-after",
            f"{len(early)} calls came too early: after {came:.2f} s where {wait:g} s was asked",
            world.timeline.story(key),
        )
    ]


def _hot_loops(worlds: Sequence[World]) -> Row:
    limit, worst, story = worlds[0].spec.promises.calls_per_second, 0, ""
    for world in worlds:
        times: dict[tuple[str, str], list[float]] = {}
        for provider in world.providers.values():
            for call in provider.calls:
                # only a failed call is repeated out of impatience
                if call.key and call.failed:
                    times.setdefault((provider.name, call.key), []).append(call.at)
        for (_, key), at in times.items():
            at.sort()
            busiest = max(bisect.bisect_right(at, start + 1) - number for number, start in enumerate(at))
            if busiest > worst:
                worst, story = busiest, world.timeline.story(key)
    measured = f"at most {worst} failed calls of one job within a second, limit {limit}"
    return _row("hot loop", measured, [Broken("hot loop", measured, story)] if worst > limit else [])


def _memory(world: World) -> Row:
    """The last third of a process's life against the first, without its first ten seconds."""
    broken, best = [], "no worker lived long enough"
    for name, life in world.service.memory.items():
        sizes = [size for age, size in life if age > 10 * world.scale]
        if len(sizes) < 12:
            continue
        third = len(sizes) // 3
        first, last = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
        best = f"{name}: {first:.0f} MB, later {last:.0f} MB"
        if last > first * 1.3 and last - first > 10:
            broken.append(Broken("memory", best))
    row = _row("memory", best, broken)
    if best.startswith("no"):
        row.verdict = "hit nothing"
    return row


def end(world: World) -> None:
    """Tell every process of the service to end, and note those that stay."""
    world.service.end_all(world.left_to_end)
    deadline = time.monotonic() + 3 + 3 * world.warmup
    while (marked(world.marker) or world.api_listens()) and time.monotonic() < deadline:
        time.sleep(0.1)
    world.left = marked(world.marker)
    # A process that hides its environment cannot be recognised, but the port can.
    if not world.left and (address := world.api_listens()):
        world.left[0] = f"something still listens on {address}, the api's address"
