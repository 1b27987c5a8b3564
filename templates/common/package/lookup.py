"""How far a request is, for the API and the command line."""

from __future__ import annotations

import re

from pydantic import BaseModel
from sqlalchemy import select

from .app import App
from .db import {@ job_name @}_results as results
from .patterns.core.request import JobRequest
from .patterns.core.store import read
from .patterns.dead_letter import dead_letters

__all__ = ["JOB", "State", "look"]

JOB = "{@ job @}"
IDENT = re.compile(r"[0-9a-f]{32}")
STATES = {"active": "running", "completed": "completed", "failed": "failed"}


class State(BaseModel):
    """`waiting`, `running`, `completed`, or `failed`: for good, as a dead letter."""

    id: str
    state: str
{@% if kind == 'async-flow' %@}
    percent: float = 0.0
    message: str = ""
{@% endif %@}


async def look(app: App, ident: str) -> State | None:
    if not IDENT.fullmatch(ident):
        return None
    # The database first: Redis forgets finished jobs after a while, and failed ones move to the dead letters.
    ref = app.producer.ref(JobRequest(JOB, {}, key=ident))
    done = select(results.c.key).where(results.c.key == ident)
    waiting = dead_letters.c.replayed_at.is_(None)
    dead = select(dead_letters.c.id).where(dead_letters.c.job_id == ref.id, waiting)
    async with read(app.store) as connection:
        if (await connection.execute(done)).first():
            return State(id=ident, state="completed"{@ ', percent=100.0' if kind == 'async-flow' @})
        if (await connection.execute(dead)).first():
            return State(id=ident, state="failed")
    queue = app.producer.queue(ref.queue)
    async with app.producer.bounded():
        job = await queue.getJob(ref.id)
        if job is None:
            return None
        state = str(await queue.getJobState(ref.id))
{@% if kind == 'async-flow' %@}
    progress = job.progress if isinstance(job.progress, dict) else {}
    return State(
        id=ident,
        state=STATES.get(state, "waiting"),  # BullMQ has several words for waiting
        percent=progress.get("percent", 0.0),
        message=progress.get("message", ""),
    )
{@% else %@}
    return State(id=ident, state=STATES.get(state, "waiting"))  # BullMQ has several words for waiting
{@% endif %@}
