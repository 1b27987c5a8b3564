"""python worker.py: delivers until SIGTERM; start as many as you like."""

import asyncio
import os
import time

import httpx2 as httpx

from jobs import RECEIVERS
from patterns.core.errors import Permanent, RateLimited, Transient
from patterns.core.event import BrokerUnavailable, Event
from patterns.core.open_store import close, create_all, open_store
from patterns.observability import configure_logging
from patterns.outbox.relay import Relay
from patterns.retry import forever, parse_retry_after
from patterns.shutdown import run_until_signalled
from patterns.signed_http import sign

SECRET = os.environ["SIGNING_SECRET"]
LEASE = float(os.environ.get("LEASE", "30"))  # a killed worker's events wait this long


class Receiver:
    """None: taken. Permanent: set aside. Anything else is sent again."""

    def __init__(self, url: str):
        self.url, self.http = url, httpx.AsyncClient(timeout=None)

    async def publish(self, events: list[Event]) -> list[Exception | None]:
        return await asyncio.gather(*map(self.post, events))

    async def post(self, event: Event) -> Exception | None:
        body = event.encode()
        head = {"Content-Type": "application/cloudevents+json"}
        head |= {"Idempotency-Key": event.id, "Signature": sign(SECRET, body)}
        try:
            async with asyncio.timeout(LEASE / 2):  # the whole exchange
                answer = await self.http.post(self.url, content=body, headers=head)
        except httpx.ConnectError as error:
            return BrokerUnavailable(str(error))  # down: all its events wait
        except (httpx.HTTPError, TimeoutError) as error:
            return Transient(type(error).__name__)
        code = answer.status_code
        wait = parse_retry_after(answer.headers.get("Retry-After"), time.time())
        if code < 300:
            return None
        if code == 429 or (code == 503 and wait):
            return RateLimited(str(code), retry_after=wait or 5)
        if code >= 500 or code in (408, 425):
            return Transient(str(code))
        return Permanent(f"refused with {code}")


async def main():
    configure_logging()
    store = open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    options = {"policy": forever(), "batch": 20, "lease": LEASE}
    # One relay each: a receiver that is down or slow delays no other.
    each = [(Receiver(url), name) for name, url in RECEIVERS.items()]
    relays = [Relay(store, to, destination=name, **options) for to, name in each]
    await run_until_signalled(relays, grace=25)
    await close(store)


if __name__ == "__main__":
    asyncio.run(main())
