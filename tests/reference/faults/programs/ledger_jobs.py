"""A job whose effect can be counted: one row in a table without a unique constraint to hide a duplicate."""

import asyncio
import os
import signal

from sqlalchemy import Column, Integer, String, Table

from studyhall.patterns.core.job import Deadline, RetryPolicy
from studyhall.patterns.core.store import metadata
from studyhall.patterns.pipeline import Done
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

QUEUE = "ledger"
KEYS = ["a-signing-key-for-the-fault-suite"]

ledger = Table(
    "ledger", metadata, Column("id", Integer, primary_key=True), Column("entry", Integer), Column("pid", Integer)
)
naive_ledger = Table("naive_ledger", metadata, Column("id", Integer, primary_key=True), Column("entry", Integer))
starts = Table(
    "starts", metadata, Column("id", Integer, primary_key=True), Column("entry", Integer), Column("note", String(50))
)


class Entry(Payload):
    entry: int
    seconds: float = 0.0
    crash_at: str = ""  # the worker kills itself there, once per job; "always": in every run
    block: float = 0.0  # seconds of blocking the event loop


def die_once(path, point, payload: Entry):
    """SIGKILL ourselves at `point` unless this job did so before (a file remembers it)."""
    if payload.crash_at != point:
        return
    try:
        os.close(os.open(f"{path}.{point}.{payload.entry}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


async def add_entry(ctx, payload: Entry):
    if payload.block:
        import time

        time.sleep(payload.block)
    await asyncio.sleep(payload.seconds)
    if payload.crash_at == "always":
        os.kill(os.getpid(), signal.SIGKILL)
    scratch = str(ctx.services)
    die_once(scratch, "before-effect", payload)

    async def save(tx):
        await tx.execute(ledger.insert().values(entry=payload.entry, pid=os.getpid()))
        die_once(scratch, "inside-effect", payload)

    return Done({"entry": payload.entry}, save)


def job_types():
    jobs = JobTypes()
    jobs.register(
        name="add-entry",
        payload=Entry,
        handler=add_entry,
        queue=QUEUE,
        retry=RetryPolicy(base=0.05, cap=0.5, attempts=3),
        deadline=Deadline(30),
    )
    return jobs


def entry(number, **fields):
    return JobRequest("add-entry", {"entry": number, **fields}, key=f"entry-{number}")
