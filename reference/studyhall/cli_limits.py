"""`studyhall limits`: how full the queues are, the AI provider's breaker, what waits in the database."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from .access import QUEUES, connected
from .limits import admission, provider_breaker
from .patterns.degraded.pending import pending, release
from .terminal import AsJson, DataDir, fail, run, say, show_json, show_table


def limits_command(
    retry: Annotated[str | None, typer.Option("--retry", metavar="JOB", help="Queue a parked request again.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Queues and their limits, the AI provider's breaker, and requests that wait in the database."""

    async def go() -> dict[str, Any]:
        async with connected(data_dir) as studyhall:
            settings, redis = studyhall.settings, studyhall.redis
            if retry and not await release(studyhall.store, retry):
                raise fail(f"no parked request {retry}; `studyhall limits` lists them")
            look = admission(settings, redis)
            breaker = provider_breaker(settings, redis)
            loads = {queue: await look.load(queue) for queue in QUEUES}
            return {
                "queues": {
                    queue: {"depth": load.depth, **load.states, "oldest_seconds": round(load.oldest(), 1)}
                    for queue, load in loads.items()
                },
                "depth_limit": settings.queue_depth or None,
                "age_limit": settings.queue_age or None,
                "provider": asdict(await breaker.state()) if breaker else None,
                "pending": asdict(await pending(studyhall.store)),
            }

    outcome = run(go())
    if as_json:
        show_json(outcome)
        return
    most, age = outcome["depth_limit"] or "no limit", outcome["age_limit"]
    show_table(
        f"Queues: at most {most} jobs, {f'{age:g} s late' if age else 'of any age'}",
        ["queue", "jobs", "ready", "delayed", "waiting for others", "oldest"],
        [
            [
                name,
                load["depth"],
                load["waiting"] + load["prioritized"] + load["paused"],
                load["delayed"],
                load["children"],
                f"{load['oldest_seconds']:g} s",
            ]
            for name, load in outcome["queues"].items()
        ],
        "No queues.",
    )
    breaker, waits = outcome["provider"], outcome["pending"]
    again = f", next try in {breaker['retry_after']:g} s" if breaker and breaker["retry_after"] else ""
    say(f"AI provider: {breaker['state'] + again if breaker else 'local'}")
    if waits["waiting"]:
        say(f"{waits['waiting']} requests wait in the database, the oldest for {waits['oldest']:g} s")
    for job_id, reason in waits["parked"].items():
        say(f"parked: {job_id}: {reason}")
