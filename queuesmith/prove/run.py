"""A run: the set-up is tried without a fault, then one fault after the other, then all is judged."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import invariants, probes
from .faults import FAULTS, Fault
from .invariants import Row
from .spec import Spec, Wrong
from .world import Batch, World

__all__ = ["Card", "Options", "prove"]


@dataclass(frozen=True)
class Options:
    quick: bool = False
    soak: float = 0.0
    seed: int = 1
    only: Sequence[str] = ()
    keep: bool = False

    @property
    def budget(self) -> float:
        return self.soak or (55.0 if self.quick else 295.0)


@dataclass
class Card:
    name: str
    seed: int
    server: str
    workers: int
    seconds: float
    rows: list[Row] = field(default_factory=list)
    evidence: str = ""

    @property
    def broken(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "broken"]

    @property
    def proved(self) -> bool:
        """Did any fault, beside `none`, hit something?"""
        return any(
            row.verdict in ("held", "broken") and row.fault in FAULTS and row.fault != "none"
            for row in self.rows
        )


Say = Callable[[str, int, int], None]


def prove(spec: Spec, options: Options, say: Say = lambda text, done, all: None) -> Card:
    """Raises Wrong when the set-up, not the service, is at fault."""
    folder = Path(tempfile.mkdtemp(prefix=f"queuesmith-prove-{spec.service.name[:20]}-"))
    began, world, card = time.monotonic(), None, None
    try:
        world = World(spec, folder, options.seed, quick=options.quick)
        say("starting", 0, 1)
        world.start()
        server = world.redis.version() if world.redis else "no Redis"
        faults = _schedule(world, options, began, say)
        _echo(world, options, began)
        _last_look(world)
        left = invariants.left_behind(world)
        world.look()
        rows = [invariants.judge(world, batch, fault) for batch, fault in faults]
        rows += invariants.judge_whole(world, bool(options.soak), left)
        card = Card(
            spec.service.name, options.seed, server, spec.service.workers, time.monotonic() - began, rows
        )
    finally:
        if world is not None:
            world.close()
            world.timeline.write(folder, world.events_of_logs())
        if card is not None and (card.broken or options.keep):
            card.evidence = str(folder)
            shutil.copyfile(spec.file, folder / "prove.toml")
        elif not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return card


def _schedule(world: World, options: Options, began: float, say: Say) -> list[tuple[Batch, Fault]]:
    names = [name for name in FAULTS if name != "none" and (not options.only or name in options.only)]
    chosen = [FAULTS[name]() for name in names]
    if options.soak:
        return _soak(world, options, began, say, chosen)
    done = [_run(world, FAULTS["none"](), _baseline_limit(world))]
    _check_baseline(world, done[0][0])
    if options.quick and not options.only:
        chosen = [fault for fault in chosen if fault.quick]
    for number, fault in enumerate(chosen, 1):
        if why := _left_out(world, options, fault, began):
            done.append((Batch(fault.name, skipped=why), fault))
            continue
        say(f"{fault.name}: {fault.does}", number, len(chosen))
        done.append(_run(world, fault, world.patience))
    return done


def _left_out(world: World, options: Options, fault: Fault, began: float) -> str:
    """Why this fault does not come."""
    spec = world.spec
    if why := fault.missing(spec):
        return why
    if fault.name in spec.promises.skip:
        return "not promised ([promises] skip)"
    if options.only:
        return ""
    cost = fault.cost * world.scale + (spec.service.lock if fault.name == "freeze" else 0)
    if time.monotonic() - began + cost > options.budget - _echo_limit(world, options):
        return f"time was up; --only {fault.name} runs it"
    return ""


def _soak(
    world: World, options: Options, began: float, say: Say, chosen: Sequence[Fault]
) -> list[tuple[Batch, Fault]]:
    """Half of the time plain work, by which memory is judged; then faults in random order, again and again."""
    none = FAULTS["none"]()
    done = [_run(world, none, _baseline_limit(world))]
    _check_baseline(world, done[0][0])
    possible = [
        fault
        for fault in chosen
        if not fault.missing(world.spec) and fault.name not in world.spec.promises.skip
    ]
    while (gone := time.monotonic() - began) < options.budget - _echo_limit(world, options):
        calm = gone < options.budget / 2 or not possible
        fault = none if calm else type(random.Random(f"{options.seed} {len(done)}").choice(possible))()
        say(f"{fault.name}: {fault.does}", int(gone), int(options.budget))
        done.append(_run(world, fault, world.patience))
    return _merged(done)


def _merged(done: Sequence[tuple[Batch, Fault]]) -> list[tuple[Batch, Fault]]:
    """The batches of a soak that are worth a line each: the faults, and all the calm ones as one."""
    calm = [batch for batch, fault in done if fault.name == "none"]
    first = calm[0]
    for batch in calm[1:]:
        first.jobs |= batch.jobs
        first.over = max(first.over, batch.over)
        first.watched = max(first.watched, batch.watched)
    return [(batch, fault) for batch, fault in done if batch is first or fault.name != "none"]


def _run(world: World, fault: Fault, limit: float) -> tuple[Batch, Fault]:
    batch = Batch(fault.name, began=world.timeline.now())
    world.batches.append(batch)
    world.rng = random.Random(f"{world.seed} {fault.name}")
    world.wait_for_api()  # an earlier fault may have killed it
    fault.run(world, batch)
    batch.end_fault(batch.over or world.timeline.now())
    settled = world.settle(batch, max(0.0, batch.over + limit - world.timeline.now()))
    if not settled and limit >= world.spec.promises.recovery and fault.name != "none":
        # The next fault must find a service that works.
        world.timeline.add("fault", f"started again by us, because {fault.name} left work undone")
        world.service.kill(*world.service.all())
    return batch, fault


def _baseline_limit(world: World) -> float:
    return max(15.0 * world.scale, world.spec.promises.recovery)


def _check_baseline(world: World, batch: Batch) -> None:
    """Without any fault nothing happens: then it is not the service that is to be judged."""
    if not batch.expected():
        said = next((job.said.strip() for job in batch.jobs.values() if job.said), "it said nothing")
        raise Wrong(f"`submit` was refused, without any fault: {said[-600:]}")
    if any(job.count for job in batch.expected()):
        _learn_places(world, set(batch.jobs))
        return
    tails = "\n".join(f"{slot.name}: {world.service.tail(slot)}" for slot in world.service.all()[:3])
    read = f" It cannot be read: {world.unreadable}." if world.unreadable else ""
    unknown = {call.line for one in world.providers.values() for call in one.calls if call.route is None}
    asked = f" Calls that no route answers: {', '.join(sorted(unknown))}." if unknown else ""
    raise Wrong(
        f"without any fault, {len(batch.expected())} jobs were taken and [effect] shows none of them after "
        f"{batch.watched - batch.began:.0f} s.{read}{asked} Is the query right, does it give the {{key}}? "
        f"The logs end with:\n{tails}"
    )


def _learn_places(world: World, keys: set[str]) -> None:
    """Where in Redis a job stays that was done without any fault: found twice, a second apart."""
    before: set[str] | None = None
    for _ in range(10):
        places = {probes.shape(place) for found in probes.in_redis(world, keys).values() for place in found}
        if places == before:
            break
        before = places
        time.sleep(1 if places else 0.3)
    world.resting = before or set()


def _echo_limit(world: World, options: Options) -> float:
    return min(world.spec.promises.recovery, 15.0 if options.quick else 60.0)


def _echo(world: World, options: Options, began: float) -> None:
    """A duplicate comes late, when a lock runs out; work of a quick run may still be on its way."""
    last = max((batch.over for batch in world.batches), default=0.0)
    jobs = {key for batch in world.batches for key in batch.jobs}
    end = last + _echo_limit(world, options)
    while world.timeline.now() < end:
        world.look()
        waiting = [batch for batch in world.batches if batch.open()]
        for batch in waiting:
            world.look_for_failures(batch.open())
        if not waiting and not _under_way(world, jobs):
            return
        time.sleep(0.3)


def _last_look(world: World) -> None:
    """What is done by now, and what is done but still on a queue, so that it will run again."""
    keys = {key for batch in world.batches for key in batch.jobs}
    queued = probes.queued(world, keys)
    world.look()
    for batch in world.batches:
        batch.watched = world.timeline.now()
        batch.queued = {key: place for key, place in queued.items() if key in batch.jobs}


def _under_way(world: World, keys: set[str]) -> bool:
    """May a job of ours still run?"""
    if any(provider.in_flight for provider in world.providers.values()):
        return True
    return bool(probes.queued(world, keys))
