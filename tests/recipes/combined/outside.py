"""A step of any recipe: another service, called once per item."""

# [outside]
# outside.py
import os

import httpx2 as httpx
from patterns.core.errors import Permanent
from patterns.outside_call import InFlight, OutsideCalls
from patterns.outside_call.http import answer_of
from patterns.outside_call.store import StoreLedger


class Outside:
    def __init__(self, store):
        # Its documentation gives the numbers: seconds of a request, life of a key.
        longest = float(os.environ.get("OUTSIDE_LONGEST", "30"))
        self.http = httpx.AsyncClient(base_url=os.environ["OUTSIDE_URL"], timeout=longest)
        ledger = StoreLedger(store)
        self.calls = OutsideCalls(ledger, "outside", longest=longest, key_life=86_400, tries=1_000)

    async def tell(self, item: str):
        def send(key: str):  # the same for this item in every run
            return answer_of(self.http.post("/items", json={"item": item}, headers={"Idempotency-Key": key}))

        return await self.calls.once(item, send)  # or the recorded answer

    async def tell_all(self, items):
        failed, later = [], None
        for item in items:
            try:
                await self.tell(item)
            except InFlight as error:  # its answer was lost; the others go on
                later = error
            except Permanent as error:  # Refused, Unclear
                failed.append(str(error))
        if later:
            raise later  # the job comes again by itself
        if failed:
            raise Permanent("; ".join(failed))  # a dead letter: resolve them, replay it


# [/outside]
