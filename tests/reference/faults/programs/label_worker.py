"""A worker that has labels printed by `misbehaving_provider`: `label_worker.py '{"way": …, "redis": …, …}'`.

Ways: "keys", "look-up", "both", "neither" through `OutsideCalls`; "naive" sends the provider's key and retries.
"""

import asyncio
import json
import sys

import httpx2
from pydantic import BaseModel

from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Transient
from studyhall.patterns.core.job import RetryPolicy, provider_key
from studyhall.patterns.core.open_store import create_all, open_store
from studyhall.patterns.outside_call import NotMade, OutsideCalls, check_status
from studyhall.patterns.outside_call.redis_ledger import RedisLedger
from studyhall.patterns.outside_call.store import StoreLedger
from studyhall.patterns.pipeline import Pipeline
from studyhall.patterns.shutdown import run_until_signalled
from studyhall.patterns.stall_budget import crash_budget
from studyhall.patterns.typed_jobs import plain

LONGEST = 2.0
PATIENCE = 0.5  # of the HTTP client, shorter than the provider's slow answers
RETRY = RetryPolicy(base=0.1, cap=0.3, attempts=200)


class Label(BaseModel):
    parcel: str


class Carrier:
    def __init__(self, url, keys):
        self._keys = keys
        self._client = httpx2.AsyncClient(base_url=url, timeout=PATIENCE)

    async def print(self, parcel, key):
        headers = {"idempotency-key": key} if self._keys else {}
        try:
            answer = await self._client.post("/labels", json={"parcel": parcel, "reference": key}, headers=headers)
        except httpx2.ConnectError as error:
            raise NotMade("the carrier cannot be reached") from error
        check_status(answer.status_code, retry_after=0.1)
        return answer.json()

    async def find(self, reference):
        answer = await self._client.get("/labels", params={"reference": reference})
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise Transient(f"HTTP {answer.status_code}")
        return answer.json()


def calls_of(spec, ledger, carrier):
    key_life = 600.0 if spec["way"] in ("keys", "both") else 0.0
    look_up = carrier.find if spec["way"] in ("look-up", "both") else None
    return OutsideCalls(
        ledger, "carrier", longest=LONGEST, key_life=key_life, look_up=look_up, tries=100, record_for=30
    )


async def main(spec):
    carrier = Carrier(spec["provider"], keys=spec["way"] in ("keys", "both", "naive"))
    if spec["ledger"] == "redis":
        ledger = RedisLedger(producer_client(spec["redis"]))
    else:
        store = open_store(spec["ledger"])
        await create_all(store)
        ledger = StoreLedger(store)
    calls = calls_of(spec, ledger, carrier)

    async def label(ctx, payload: Label):
        key = f"label/{payload.parcel}"
        if spec["way"] == "naive":
            return await carrier.print(payload.parcel, provider_key(key, "carrier"))
        return await calls.once(key, lambda reference: carrier.print(payload.parcel, reference))

    pipeline = Pipeline(plain(Label, label, retry=RETRY), crash_budget(1_000))
    worker = ReliableWorker(
        "labels", pipeline, url=spec["redis"], concurrency=5, lock_duration=1.0, stalled_interval=0.3
    )
    await run_until_signalled([worker], grace=5)
    await calls.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
