"""A fault: a function that harms a world and says what it hit. A fault that hit nothing has proved nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from queuesmith.prove import probes
from queuesmith.prove.processes import family, owner
from queuesmith.prove.spec import Spec

if TYPE_CHECKING:
    from queuesmith.prove.service import Running
    from queuesmith.prove.world import Batch, World

Run = Callable[["World", "Batch"], None]


@dataclass(frozen=True)
class Fault:
    """`needs(spec)`: what the file lacks for it. `cost`: about how many seconds it takes on a service that keeps its
    promises, without the `lock` that some wait for. `may_fail`: a job may end as a visible failure without breaking
    a promise. `backlog`: the jobs are sent before any worker runs."""

    name: str
    does: str
    run: Run
    needs: Callable[[Spec], str]
    quick: bool = False
    cost: float = 6.0
    may_fail: bool = False
    backlog: bool = False

    def seconds(self, spec: Spec) -> float:
        locked = self.name == "freeze" or self.name.startswith("kill-")
        longer = spec.outage if self.name == "outage" else 0.0
        return self.cost + longer + (spec.service.lock if locked else 0.0)


def nothing(spec: Spec) -> str:
    return ""


def fault(
    name: str, does: str, needs: Callable[[Spec], str] = nothing, **options: bool | float
) -> Callable[[Run], Fault]:
    return lambda run: Fault(name, does, run, needs, **options)  # type: ignore[arg-type]


def effective(spec: Spec) -> str:
    known = any(route.effect for provider in spec.providers for route in provider.routes)
    return "" if known else "needs a [provider.NAME] with an effect"


def over(world: World, batch: Batch, settle: bool = False) -> None:
    """The fault has ended: recovery is counted from here."""
    batch.end_fault(world.timeline.now())
    world.linger(0)
    if settle:
        world.settle(batch, world.patience)


def half(world: World) -> int:
    return max(2, world.spec.service.jobs // 2)


def still_open(world: World, batch: Batch) -> int:
    world.look()
    return len(batch.open())


def strike(
    world: World,
    batch: Batch,
    jobs: int,
    whom: Callable[[], str],
    done: int = 0,
    mend: Callable[[], None] = lambda: None,
) -> bool:
    """Call `whom()`, which hits something and names it, while jobs run and `done` are done.

    Quick jobs may be over by then: then again with four times as many, after `mend()` has undone it.
    """
    for times in (1, 4, 16) if world.sends_many else (1,):
        if times > 1:
            mend()
        if not world.backlog(world.new_jobs(batch, jobs * times), done) and still_open(world, batch):
            break  # no worker takes them, and none would take more
        hits, name = len(batch.hits), whom()
        if name:
            hit_work(world, batch, name)
        if len(batch.hits) > hits:
            return True
    return False


def hit_work(world: World, batch: Batch, whom: str) -> None:
    """Note a hit if work is left."""
    open_jobs = max(still_open(world, batch), sum(provider.in_flight for provider in world.providers.values()))
    if not open_jobs:
        with contextlib.suppress(Exception):  # Redis may be down
            states = probes.bullmq_states(world, batch.jobs).values()
            open_jobs = sum(state == "active" for state, _ in states)
    if open_jobs:
        batch.hits.append(f"{whom} with {many(open_jobs, 'open job')}")


def many(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def at_work(world: World) -> Running | None:
    """A worker with a call to a provider under way, or any living one."""
    calls = [call for provider in world.providers.values() for call in provider.calls[-20:] if not call.done_at]
    living = [slot for slot in world.service.workers() if slot.child and slot.alive]
    for slot in living:
        if slot.child and any(owner(call.port, family(slot.child.pid)) for call in calls):
            return slot
    return world.rng.choice(living) if living else None
