"""The parcels' labels with this repository's patterns: `ReliableWorker`, markers, one key per label.

labels.py worker | submit [--crash] PARCEL…
"""

import asyncio
import os
import sys

import httpx2
from bullmq import Queue
from sqlalchemy import Column, String, Table, insert

from studyhall.patterns.bullmq_worker import FailPermanently, ReliableWorker, RetryLater
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.job import provider_key
from studyhall.patterns.core.open_store import create_all, open_store
from studyhall.patterns.core.store import metadata
from studyhall.patterns.idempotency import Inbox, fingerprint
from studyhall.patterns.shutdown import run_until_signalled

QUEUE = "labels"
labels = Table("labels", metadata, Column("parcel", String(40)), Column("label", String(40)))


async def work() -> None:
    store = open_store(f"sqlite:///{os.environ['STORE']}")
    await create_all(store)
    inbox = Inbox(store, "labels")
    carrier = httpx2.AsyncClient(base_url=os.environ["CARRIER_URL"], timeout=5)

    async def process(job, token):
        parcel, mark = job.data["parcel"], fingerprint(job.data)
        if job.data.get("crash"):
            if job.stalledCounter >= 3:
                raise FailPermanently("its worker died three times")
            os._exit(7)
        if await inbox.seen(parcel, mark):
            return
        try:
            answer = await carrier.post(
                "/labels", json={"parcel": parcel}, headers={"Idempotency-Key": provider_key(parcel, "label")}
            )
        except httpx2.HTTPError as error:
            raise RetryLater(0.5, reason=type(error).__name__) from None
        if answer.status_code == 429:
            raise RetryLater(float(answer.headers["Retry-After"]), reason="429")
        if answer.status_code >= 500:
            raise RetryLater(1, reason=str(answer.status_code))
        if answer.is_error:
            raise FailPermanently(f"the carrier said {answer.status_code}")

        async def effect(tx) -> None:
            await tx.execute(insert(labels).values(parcel=parcel, label=answer.json()["id"]))

        await inbox.once(parcel, mark, effect)

    url = os.environ["REDIS_URL"]
    worker = ReliableWorker(QUEUE, process, url=url, concurrency=4, lock_duration=3, stalled_interval=0.7)
    print("ready", flush=True)
    await run_until_signalled([worker], grace=20)


async def submit(*parcels: str, crash: bool) -> None:
    queue = Queue(QUEUE, {"connection": producer_client(os.environ["REDIS_URL"])})
    async with asyncio.timeout(8):
        for parcel in parcels:
            data = {"parcel": parcel, "note": os.environ.get("NOTE", "")} | ({"crash": True} if crash else {})
            await queue.add("label", data, {"jobId": f"label-{parcel}"})
    await queue.close()


if __name__ == "__main__":
    crash, keys = "--crash" in sys.argv, [word for word in sys.argv[2:] if word != "--crash"]
    asyncio.run(work() if sys.argv[1] == "worker" else submit(*keys, crash=crash))
