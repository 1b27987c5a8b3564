{@% set types = columns | map(attribute='type') | list %@}
{@% set scheduled = 'schedule' in patterns %@}
"""The jobs of this service: what they take, what they do, how often they are tried."""

from __future__ import annotations

import asyncio
import time
{@% if 'str' in types or 'int' in types %@}
from typing import Annotated

from pydantic import Field
{@% endif %@}
{@% if not ('str' in types or 'int' in types) %@}

{@% endif %@}
{@% if scheduled %@}
from sqlalchemy import delete, insert
{@% else %@}
from sqlalchemy import insert
{@% endif %@}
from sqlalchemy.ext.asyncio import AsyncConnection

from . import db
from .patterns.core.job import Deadline, RetryPolicy
from .patterns.pipeline import Done, JobContext
{@% if scheduled %@}
from .patterns.schedule import Schedule, Schedules
from .patterns.signed_payload import Signer
{@% endif %@}
from .patterns.typed_jobs import JobTypes, Payload
from .settings import Settings

STEPS = 5
{@% if scheduled %@}
KEPT_SECONDS = 90 * 24 * 3600.0
{@% endif %@}
{@% if 'str' in types %@}
Text = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]  # PostgreSQL refuses NUL
{@% endif %@}
{@% if 'int' in types %@}
Number = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # what an INTEGER column holds
{@% endif %@}


class {@ job_class @}(Payload):
    """Checked when a job is enqueued and again when it runs. A changed field is a new version: see typed_jobs."""

{@% for column in columns %@}
    {@ column.name @}: {@ {'str': 'Text', 'int': 'Number'}.get(column.type, column.type) @}
{@% endfor %@}


async def {@ job_name @}(ctx: JobContext, payload: {@ job_class @}) -> Done:
    settings: Settings = ctx.services
    # Your slow work goes here, outside any transaction. It may run again after a crash, so an outside call
    # gets `ctx.provider_key("step")` as its idempotency key.
{@% if kind == 'async-flow' %@}
    for step in range(1, STEPS + 1):
        await asyncio.sleep(settings.step_seconds)
        await ctx.progress("working", 100 * step / STEPS, f"step {step} of {STEPS}")
{@% else %@}
    for _ in range(STEPS):
        await asyncio.sleep(settings.step_seconds)
{@% endif %@}

    async def save(tx: AsyncConnection) -> None:
        # In the transaction that marks the job as done: once, however often the job is delivered.
        row = {"key": ctx.key, **payload.model_dump(), "done_at": time.time()}
        await tx.execute(insert(db.{@ job_name @}_results).values(row))

    return Done({"steps": STEPS}, save)
{@% if scheduled %@}


class CleanUp(Payload):
    """Takes nothing."""


async def clean_up(ctx: JobContext, payload: CleanUp) -> Done:
    """Deletes old results every night."""
    old = db.{@ job_name @}_results.c.done_at < time.time() - KEPT_SECONDS

    async def save(tx: AsyncConnection) -> None:
        await tx.execute(delete(db.{@ job_name @}_results).where(old))

    return Done(save=save)
{@% endif %@}


def job_types() -> JobTypes:
    """The registry that the API and the workers share."""
    jobs = JobTypes()
    jobs.register(
        name="{@ job @}",
        payload={@ job_class @},
        handler={@ job_name @},
        queue="work",
        retry=RetryPolicy(base=1, cap=60, attempts=5),
        deadline=Deadline(60, growth=2, longest=300),
    )
{@% if scheduled %@}
    jobs.register(name="clean-up", payload=CleanUp, handler=clean_up, queue="upkeep")
{@% endif %@}
    return jobs
{@% if scheduled %@}


def schedules(jobs: JobTypes, signer: Signer) -> Schedules:
    """Any number of workers may run: a tick takes effect once. Raise `version` with every change."""
    nightly = Schedule(id="nightly-clean-up", job="clean-up", cron="15 3 * * *", tz="UTC", jitter=60)
    return Schedules(
        jobs,
        [nightly],
        owner="{@ project_name @}",
        version=1,
        sign=signer.sign,
    )
{@% endif %@}
