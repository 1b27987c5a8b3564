"""Faults of the workers: killed, told to end, frozen, copied, replaced, poisoned, with a wrong clock."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from queuesmith.prove import clock
from queuesmith.prove.spec import Program, Spec

from .fault import at_work, effective, fault, half, hit_work, over, still_open, strike

if TYPE_CHECKING:
    from queuesmith.prove.provider import Call
    from queuesmith.prove.service import Running
    from queuesmith.prove.world import Batch, World

AHEAD = 3600


@fault("none", "no fault at all: does the set-up work?", quick=True, cost=3)
def none(world: World, batch: Batch) -> None:
    first, *others = world.new_jobs(batch, half(world))
    # Can one be sent before any worker has run? Then other faults need not start the workers twice.
    wait = world.submit_later([first])
    world.early = world.until(lambda: first.accepted or first.refused, 8, 0.05) and first.accepted
    world.service.wake()
    wait()
    if not first.accepted:
        world.submit([first])
    # A submit that does not work is not tried with all the others: each may take long.
    if first.accepted:
        world.submit(others)
    batch.hits.append("nothing was to be hit")


@fault(
    "kill-at-effect",
    "SIGKILL to the worker after a provider's effect, before its answer",
    effective,
    quick=True,
    cost=3,
)
def kill_at_effect(world: World, batch: Batch) -> None:
    for size in world.rounds(2):
        jobs = world.new_jobs(batch, size)
        keys, struck = {job.key for job in jobs}, threading.Event()

        def strike(call: Call, keys: set[str] = keys, struck: threading.Event = struck) -> bool:
            if call.key not in keys or struck.is_set():
                return False
            struck.set()
            why = f" after {call.line} of {call.key}"
            slot = world.service.kill_owner(call.port, why)
            if slot is None:  # something is between us and the worker: kill all
                world.service.kill(*world.service.workers(), why=why)
            batch.hits.append(f"{slot.name if slot else 'all workers'} at {call.key}")
            return True

        def nameless(size: int = size) -> bool:
            made = [call for provider in world.providers.values() for call in provider.calls if call.effect]
            return len(made) >= size and not any(call.key for call in made)

        world.on_effect(strike)
        wait = world.submit_later(jobs)
        world.until(lambda struck=struck, nameless=nameless: struck.is_set() or nameless(), 15)  # type: ignore[misc]
        world.on_effect(None)
        wait()
        over(world, batch, settle=True)
        if nameless():
            batch.unhit = (
                "the provider was called, and no request carried a key of a job, so nobody can tell whose it was or "
                "whether it came twice: send the key in its address or body"
            )
            return


def _own_effect(spec: Spec) -> str:
    own = spec.effect.kind != "provider"
    return "" if own else "needs an [effect] of the service's own, not a provider's"


@fault(
    "kill-at-commit",
    "SIGKILL to all workers the moment an effect is seen, before the job is acknowledged",
    _own_effect,
    quick=True,
    cost=3,
    backlog=True,
)
def kill_at_commit(world: World, batch: Batch) -> None:
    def kill() -> str:
        world.service.kill(*world.service.workers(), why=" when an effect was seen")
        return "all workers"

    for size in world.rounds(2):
        strike(world, batch, size, kill, done=1)
        over(world, batch, settle=True)


@fault("kill-random", "SIGKILL to all workers at a random moment of their work", quick=True, cost=3, backlog=True)
def kill_random(world: World, batch: Batch) -> None:
    def kill() -> str:
        moment, half_done = time.monotonic() + world.rng.random() * 0.2, still_open(world, batch) // 2
        while time.monotonic() < moment and still_open(world, batch) > half_done:
            time.sleep(0.005)
        world.service.kill(*world.service.workers())
        return "all workers"

    for size in world.rounds(2):
        strike(world, batch, size, kill)
        over(world, batch, settle=True)


@fault("kill-all", "SIGKILL to everything at one moment: workers, api and Redis", cost=3, backlog=True)
def kill_all(world: World, batch: Batch) -> None:
    def kill() -> str:
        # Redis last: while it dies the workers could finish.
        world.service.kill(*world.service.all())
        if world.redis:
            world.timeline.add("fault", "SIGKILL Redis")
            world.redis.kill()
        return "everything"

    def mend() -> None:
        if world.redis:
            world.pause(1)
            world.redis.start()
            world.timeline.add("fault", "Redis is back")

    def again() -> None:
        mend()
        world.wait_for_api()

    strike(world, batch, world.spec.service.jobs, kill, done=1, mend=again)
    mend()
    over(world, batch)


@fault("term", "SIGTERM to the workers in the middle of their work, as in a deploy", quick=True, backlog=True)
def term(world: World, batch: Batch) -> None:
    promises, slowest = world.spec.promises, 0.0
    for size in world.rounds(2):
        working = world.backlog(world.new_jobs(batch, size))
        if working and (slot := at_work(world)):
            world.until(lambda slot=slot: world.service.up(slot, world.warmup), 10)  # type: ignore[misc]
            hit_work(world, batch, slot.name)
            code, took = world.service.terminate(slot, promises.shutdown)
            slowest = max(slowest, took)
            if code is None:
                batch.broke("shutdown", f"{slot.name} still ran {promises.shutdown:g} s after SIGTERM")
            elif code not in promises.exit_codes:
                how = f"died of signal {-code}" if code < 0 else f"exit code {code}"
                batch.broke("shutdown", f"{slot.name}: {how} after {took:.1f} s")
            slot.wanted = True
        over(world, batch, settle=True)
    batch.facts.append(f"slowest exit {slowest:.1f} s")


@fault(
    "freeze",
    "SIGSTOP to a worker in the middle of its work for longer than its lock, then SIGCONT",
    quick=True,
    cost=4,
    backlog=True,
)
def freeze(world: World, batch: Batch) -> None:
    frozen: list[Running] = []

    def freeze_one() -> str:
        if slot := at_work(world):
            frozen.append(slot)
            world.service.freeze(slot)
            world.pause(0.5)
        return slot.name if slot else ""

    def thaw() -> None:
        while frozen:
            world.service.thaw(frozen.pop())

    if strike(world, batch, world.spec.service.jobs, freeze_one, mend=thaw):
        world.wait_aside(world.spec.service.lock + 2 * world.scale)
    thaw()
    over(world, batch)


@fault("clock", "the clock of one worker is an hour ahead")
def clock_ahead(world: World, batch: Batch) -> None:
    env, why = clock.ahead(AHEAD, world.folder)
    first, *others = world.service.workers()
    if not why:
        for slot in [first, *others[1:]]:  # two are left, one right and one wrong
            world.service.kill(slot)
        first.env = env
        world.service.wait_up(world.warmup)
        world.submit(world.new_jobs(batch, world.spec.service.jobs))
        pid = first.child.pid if first.child else 0
        why = clock.wrong(pid, env) if first.alive else "that worker does not run"
    if why:
        batch.unhit = why
        world.submit(world.new_jobs(batch, 2))
    else:
        batch.hits.append(first.name)
        # then only the wrong one, then only the right one: each reads what the other wrote
        for slot in world.service.workers():
            world.service.kill(slot)
            over(world, batch, settle=True)
            world.submit(world.new_jobs(batch, 2))
    over(world, batch)


@fault("copies", "two copies of every process")
def copies(world: World, batch: Batch) -> None:
    added = world.service.add_copies()
    world.pause(1)
    world.submit(world.new_jobs(batch, world.spec.service.jobs))
    if all(slot.alive for slot in added):
        batch.hits.append(f"{len(added)} more processes")
    over(world, batch, settle=True)
    for slot in added:
        world.service.remove(slot, world.spec.promises.shutdown)


@fault(
    "rolling", "a rolling deploy: new workers start beside the old ones, which get SIGTERM, while work goes on", cost=10
)
def rolling(world: World, batch: Batch) -> None:
    service = world.spec.service
    new = world.service.add_copies(Program(service.next or service.worker.run, service.worker.ready))
    old = [slot for slot in world.service.workers() if slot not in new]
    world.service.wait_up(world.warmup)
    for slot in old:
        # Quick jobs are over when their submit ends: strike during it, and again with more, as in `strike`.
        for times in (1, 4, 16) if world.sends_many else (1,):
            hits, jobs = len(batch.hits), times * (service.jobs // len(old) + 1)
            wait = world.submit_later(world.new_jobs(batch, jobs))

            def struck(slot: Running = slot, hits: int = hits) -> bool:
                hit_work(world, batch, slot.name)
                return len(batch.hits) > hits or all(job.accepted or job.refused for job in batch.jobs.values())

            if slot.alive and world.until(struck, 15, 0.005) and len(batch.hits) > hits:
                world.service.terminate(slot, world.spec.promises.shutdown)
                break
            wait()
        wait()
    world.submit(world.new_jobs(batch, 2))
    over(world, batch, settle=True)


def _poison(spec: Spec) -> str:
    return "" if spec.service.poison else "needs `poison` in [service]: how to send a job that kills its worker"


@fault("poison", "a job that kills its worker, among others", _poison, cost=12)
def poison(world: World, batch: Batch) -> None:
    exits, promised = len(world.service.exits), world.spec.promises.crashes
    world.submit(world.new_jobs(batch, 1, "failed"), world.spec.service.poison)
    world.submit(world.new_jobs(batch, half(world)))
    world.until(lambda: len(world.service.exits) > exits, 15)
    world.settle(batch, world.patience + 3 * world.warmup)
    deaths = [death for death in world.service.exits[exits:] if not death.ours]
    batch.facts.append(f"{len(deaths)} workers died")
    batch.hits += [f"{death.name} died with {death.code}" for death in deaths]
    if len(deaths) > promised:
        batch.broke("poison", f"it killed {len(deaths)} workers, promised at most {promised}")
    over(world, batch)
