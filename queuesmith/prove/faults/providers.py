"""Faults of the providers: what they answer to the calls of this fault's jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from queuesmith.prove.spec import Spec

from .fault import Fault, effective, fault, over, still_open

if TYPE_CHECKING:
    from queuesmith.prove.provider import Call
    from queuesmith.prove.world import Batch, World


class Asked:
    """The calls of one fault's jobs so far."""

    def __init__(self, keys: list[str], lasts: float) -> None:
        self.keys, self.lasts, self.times, self.first = keys, lasts, Counter[str](), 0.0

    def first_time(self, call: Call) -> bool:
        return self.times[call.key] == 1

    def early(self, call: Call) -> bool:
        return call.at - self.first < self.lasts


def _answers(
    name: str,
    does: str,
    answer: Callable[[Asked, Call], str | None],
    *,
    failing: int = 0,
    times: int = 1,
    lasts: Callable[[Spec], float] = lambda spec: 0.0,
    needs: Callable[[Spec], str] = effective,
    **options: bool | float,
) -> Fault:
    """`failing`: how many of the jobs must fail, the first ones."""

    @fault(name, does, needs, **options)
    def run(world: World, batch: Batch) -> None:
        jobs = world.new_jobs(batch, failing, "failed")
        jobs += world.new_jobs(batch, failing or world.spec.service.jobs * times)
        asked = Asked([job.key for job in jobs], lasts(world.spec) * world.scale)
        wanted = set(asked.keys)

        def script(call: Call) -> str | None:
            if call.key not in wanted:
                return None
            asked.first = asked.first or call.at
            asked.times[call.key] += 1
            return answer(asked, call)

        for provider in world.providers.values():
            provider.scripts.append(script)
        world.timeline.add("fault", does)
        world.submit(jobs)
        # Until every job has called once, or is done without a call: the fault is over then, not the jobs.
        world.until(lambda: asked.times.keys() >= wanted or not still_open(world, batch), 20, 0.05)
        if asked.first and asked.lasts:
            world.pause((asked.first + asked.lasts - world.timeline.now()) / world.scale)
            batch.facts.append(f"{asked.lasts:g} s long")
        calls = [call for provider in world.providers.values() for call in provider.calls if call.key in wanted]
        if counts := Counter(call.answer for call in calls if call.failed):
            batch.hits.append(", ".join(f"{count} x {answer}" for answer, count in counts.items()))
        over(world, batch)

    return run


def _once(answer: str) -> Callable[[Asked, Call], str | None]:
    return lambda asked, call: answer if asked.first_time(call) else None


lost = _answers("lost", "the answer is lost after the effect, once per job", _once("lost"), quick=True)
slow = _answers("slow", "every first answer takes 6 s, the effect comes after 3 s", _once("slow"), cost=12)
rate_limited = _answers("429", "429 with Retry-After, once per job", _once("429"), quick=True)
outage = _answers(
    "outage",
    "500 to every call for 6 s, or [faults] outage",
    lambda asked, call: "500" if asked.early(call) else None,
    lasts=lambda spec: spec.outage,
    quick=True,
)
hang = _answers(
    "hang",
    "no answer at all for 20 s, once for each of two jobs",
    lambda asked, call: "hang" if call.key in asked.keys[:2] and asked.first_time(call) else None,
    cost=25,
)
refused = _answers(
    "refused",
    "422 to every call of two jobs: they must end as visible failures",
    lambda asked, call: "422" if call.key in asked.keys[:2] else None,
    failing=2,
    may_fail=True,
    quick=True,
)


def _mix(spec: Spec) -> str:
    mixed = any(len(route.answers) > 1 for provider in spec.providers for route in provider.routes)
    return effective(spec) or ("" if mixed else 'the file gives no mix: answers = "ok 92%, lost 3%, …"')


def _mixed(asked: Asked, call: Call) -> str:
    """Each bad answer of the mix once, to the first jobs; by chance alone, all 24 calls may be good."""
    bad = [answer for answer, _ in call.route.answers if answer != "ok"] if call.route else []
    place = asked.keys.index(call.key)
    return bad[place] if place < len(bad) and asked.first_time(call) else "mix"


mixed = _answers("answers", "answers in the file's own mix", _mixed, times=2, needs=_mix, cost=8)
