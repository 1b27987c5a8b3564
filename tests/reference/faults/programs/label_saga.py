"""Drives sagas that have a label printed by `misbehaving_provider`: `label_saga.py '{"store": …, "provider": …, …}'`.

`longest`: the longest a request may take; 0 is the naive twin, which looks a lost request up at once. `fails` in
the saga's data: the step after the label refuses. With "way": "keys" there is no look-up, only the provider's key.
"""

import asyncio
import json
import sys

import httpx2

from studyhall.patterns.core.errors import Permanent, Transient
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import open_store
from studyhall.patterns.outside_call import NotMade, check_status
from studyhall.patterns.saga import DbStep, Saga, SagaRunner, SagaStep

PATIENCE = 0.5  # of the HTTP client, shorter than the provider's slow answers
# More than the provider refuses in a row: a saga that gives up is undone, and the proof counts on the others.
RETRY = RetryPolicy(base=0.05, cap=0.2, attempts=12)


def parcel_saga(url, longest, way):
    http = httpx2.AsyncClient(base_url=url, timeout=PATIENCE)

    async def request(method, **content):
        try:
            return await http.request(method, "/labels", **content)
        except httpx2.ConnectError as error:
            raise NotMade("the carrier cannot be reached") from error

    async def label(ctx):
        headers = {"idempotency-key": ctx.key} if way == "keys" else {}
        answer = await request("POST", json={"parcel": ctx.saga_id, "reference": ctx.key}, headers=headers)
        check_status(answer.status_code, retry_after=0.1)
        return dict(answer.json())

    async def find(ctx):
        answer = await request("GET", params={"reference": ctx.key})
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise Transient(f"HTTP {answer.status_code}")
        return dict(answer.json())

    async def void(ctx):
        answer = await request("DELETE", params={"reference": ctx.key})
        if answer.status_code != 404:  # void already, or never printed
            check_status(answer.status_code, retry_after=0.1)

    async def hand_over(ctx, tx):
        if ctx.data["fails"]:
            raise Permanent("the customer moved")

    async def take_back(ctx, tx):
        """Nothing to write in this one."""

    limits = {"retry": RETRY, "undo_retry": RetryPolicy(base=0.05, cap=0.2, attempts=50)}
    look_up = find if way == "look-up" else None
    return Saga(
        "parcel",
        [
            SagaStep(
                "label",
                label,
                void,
                look_up,
                deadline=1.0,
                longest=longest,
                key_life=600.0 if way == "keys" else 0.0,
                crashes=100,
                **limits,
            ),
            DbStep("hand-over", hand_over, take_back, deadline=1.0, crashes=100, **limits),
        ],
    )


async def main(spec):
    saga = parcel_saga(spec["provider"], spec["longest"], spec["way"])
    runner = SagaRunner(open_store(spec["store"]), saga, lease_margin=1.0)
    await runner.run_forever(poll=0.1)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
