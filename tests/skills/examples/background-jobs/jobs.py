# [jobs]
# jobs.py: imported by producers and workers alike
from sqlalchemy import text

from patterns.pipeline import Done, JobContext
from patterns.typed_jobs import JobTypes, Payload

jobs = JobTypes()


class AddCredit(Payload):
    account: str
    cents: int


# More per type: retry=RetryPolicy(base=1, cap=60, attempts=5), version=2, upcasts={1: …}
@jobs.register(name="add-credit", payload=AddCredit, queue="credits", deadline=30.0)
async def add_credit(ctx: JobContext, payload: AddCredit) -> Done:
    # Slow or outside work here, with ctx.provider_key("step") as the provider's idempotency key.
    async def save(tx) -> None:  # commits together with the marker: once
        await tx.execute(text("UPDATE accounts SET cents = cents + :cents WHERE id = :account"), payload.model_dump())

    return Done({"added": payload.cents}, save)


# [/jobs]
