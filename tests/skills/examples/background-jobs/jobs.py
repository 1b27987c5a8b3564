# [jobs]
# jobs.py: imported by producers and workers alike
from sqlalchemy import Column, Integer, String, Table, update
from sqlalchemy.ext.asyncio import AsyncConnection

from patterns.pipeline import Done, JobContext
from patterns.retry import RetryPolicy
from patterns.store import metadata
from patterns.typed_jobs import JobTypes, Payload

accounts = Table(
    "accounts", metadata, Column("id", String(40), primary_key=True), Column("cents", Integer, nullable=False)
)
jobs = JobTypes()


class AddCredit(Payload):
    account: str
    cents: int


@jobs.register(
    name="add-credit",
    payload=AddCredit,
    queue="credits",
    retry=RetryPolicy(base=1, cap=60, attempts=5),
    deadline=30.0,
)
async def add_credit(ctx: JobContext, payload: AddCredit) -> Done:
    # Slow or outside work here, with ctx.provider_key("step") as the provider's idempotency key.
    async def save(tx: AsyncConnection) -> None:  # commits together with the marker: once
        mine = accounts.c.id == payload.account
        await tx.execute(update(accounts).where(mine).values(cents=accounts.c.cents + payload.cents))

    return Done({"added": payload.cents}, save)


# [/jobs]
