# [enqueue]
import os

from fastapi import FastAPI, HTTPException

from jobs import AddCredit, jobs
from patterns.core.errors import Overloaded
from patterns.producer import JobRequest, Producer, QueueUnavailable
from patterns.typed_jobs import validated

app = FastAPI()
producer = Producer(os.environ["REDIS_URL"], validated(jobs))  # one per process


@app.post("/payments/{payment_id}/credit", status_code=202)
async def credit(payment_id: str, account: str, cents: int):
    # The key names the business request: a repeated call is the same job.
    request = JobRequest("add-credit", AddCredit(account=account, cents=cents), key=payment_id)
    try:
        return {"job": (await producer.enqueue(request)).id}
    except (QueueUnavailable, Overloaded) as error:  # within 1.5 s, whatever state Redis is in
        raise HTTPException(503, str(error), {"Retry-After": "5"}) from error


# [/enqueue]


async def example(redis_url: str, store_url: str) -> None:
    first = await credit("pay-1", "alice", 500)
    again = await credit("pay-1", "alice", 500)
    assert first == again == {"job": "add-credit.pay-1"}
    counts = await producer.queue("credits").getJobCounts("prioritized", "waiting")
    assert sum(counts.values()) == 1, counts
    await producer.close()
