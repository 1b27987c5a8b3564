# [sync]
# texts.py: no event loop, and a provider without keys that can be asked
import sqlite3

import httpx2 as httpx

from patterns.outside_call import check_status
from patterns.outside_call.dbapi import DbApiLedger
from patterns.outside_call.sync import SyncOutsideCalls


class Texts:
    def __init__(self, path: str, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=20)
        ledger = DbApiLedger(lambda: sqlite3.connect(path))  # or psycopg.connect(url)
        ledger.create()
        self.calls = SyncOutsideCalls(ledger, "texts", longest=30, look_up=self.find)

    def send(self, order: str, phone: str) -> dict:
        def post(reference: str) -> dict:
            answer = self.http.post("/texts", json={"reference": reference, "phone": phone})
            check_status(answer.status_code)
            return answer.json()

        # InFlight: come back in `error.delay` s, in Celery by `raise self.retry(countdown=error.delay)`.
        return self.calls.once(f"text/{order}", post)

    def find(self, reference: str) -> dict | None:
        answer = self.http.get(f"/texts/{reference}")
        return None if answer.status_code == 404 else answer.raise_for_status().json()


# [/sync]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    await asyncio.to_thread(without_event_loop)


def without_event_loop() -> None:
    import json
    import tempfile
    import time

    from patterns.outside_call import InFlight

    sent, cut = {}, ["cut the first answer"]

    def provider(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            found = sent.get(request.url.path.split("/")[-1])
            return httpx.Response(200 if found else 404, json=found)
        number = len(sent) + 1
        sent[json.loads(request.content)["reference"]] = {"text": number}
        if cut:
            raise httpx.ReadError(cut.pop())
        return httpx.Response(200, json={"text": number})

    with tempfile.TemporaryDirectory() as folder:
        texts = Texts(f"{folder}/calls.db", "http://texts")
        texts.http = httpx.Client(base_url="http://texts", transport=httpx.MockTransport(provider))
        ledger = DbApiLedger(lambda: sqlite3.connect(f"{folder}/calls.db"))
        texts.calls = SyncOutsideCalls(ledger, "texts", longest=0.2, look_up=texts.find)
        try:
            texts.send("7", "0171")
            raise AssertionError("the answer was cut")
        except InFlight as busy:
            time.sleep(busy.delay + 0.1)
        assert texts.send("7", "0171") == texts.send("7", "0171") == {"text": 1}
        assert texts.send("8", "0171") == {"text": 2}
        assert len(sent) == 2
