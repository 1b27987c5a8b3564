"""The jobs of this service: what they take, what they do, how often they are tried."""

from __future__ import annotations

import asyncio
import time

{@% if 'str' in columns | map(attribute='type') %@}
from pydantic import Field
{@% endif %@}
{@% if kind == 'background-jobs' %@}
from sqlalchemy import delete, insert
{@% else %@}
from sqlalchemy import insert
{@% endif %@}
from sqlalchemy.ext.asyncio import AsyncConnection

from . import db
from .patterns.deadline import Deadline
from .patterns.pipeline import Done, JobContext
from .patterns.retry import RetryPolicy
{@% if kind == 'background-jobs' %@}
from .patterns.schedule import Schedule, Schedules
{@% endif %@}
from .patterns.typed_jobs import JobTypes, Payload
from .settings import Settings

STEPS = 5
{@% if kind == 'background-jobs' %@}
KEPT_SECONDS = 90 * 24 * 3600.0
{@% endif %@}


class {@ job_class @}(Payload):
    """Checked when a job is enqueued and again when it runs. A changed field is a new version: see typed_jobs."""

{@% for column in columns %@}
{@% if column.type == 'str' %@}
    {@ column.name @}: str = Field(min_length=1, max_length=500)
{@% else %@}
    {@ column.name @}: {@ column.type @}
{@% endif %@}
{@% endfor %@}


async def {@ job_name @}(ctx: JobContext, payload: {@ job_class @}) -> Done:
    settings: Settings = ctx.services
    # Your slow work goes here, outside any transaction. It may run again after a crash, so a call to somebody
    # else gets `ctx.provider_key("step")` as its idempotency key.
    for step in range(1, STEPS + 1):
        await asyncio.sleep(settings.step_seconds)
        await ctx.progress("working", 100 * step / STEPS, f"step {step} of {STEPS}")

    async def save(tx: AsyncConnection) -> None:
        # In the transaction that marks the job as done: once, however often the job is delivered.
        row = {"key": ctx.key, **payload.model_dump(), "done_at": time.time()}
        await tx.execute(insert(db.{@ job_name @}_results).values(row))

    return Done({"steps": STEPS}, save)
{@% if kind == 'background-jobs' %@}


class CleanUp(Payload):
    """Takes nothing."""


async def clean_up(ctx: JobContext, payload: CleanUp) -> Done:
    """Old results go, every night."""
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
{@% if kind == 'background-jobs' %@}
    jobs.register(name="clean-up", payload=CleanUp, handler=clean_up, queue="upkeep")
{@% endif %@}
    return jobs
{@% if kind == 'background-jobs' %@}


def schedules(jobs: JobTypes) -> Schedules:
    """Any number of workers may run: a tick takes effect once. Raise `version` with every change."""
    nightly = Schedule(id="nightly-clean-up", job="clean-up", cron="15 3 * * *", tz="UTC", jitter=60)
    return Schedules(jobs, [nightly], owner="{@ project_name @}", version=1)
{@% endif %@}
