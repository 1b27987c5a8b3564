"""A process whose callers hammer an HTTP provider, through the shared breaker or (naive) with plain retries.

Every call that reaches the provider is counted by the provider itself. `hold` keeps a call open, so that the
test can kill the process that is probing.
"""

import argparse
import asyncio
import contextlib
import json
import os

import httpx2

from studyhall.patterns.circuit_breaker import BreakerOpen, CircuitBreaker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Transient


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis")
    parser.add_argument("--provider", required=True)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--failures", type=int, default=5)
    parser.add_argument("--cooldown", type=float, default=1.0)
    parser.add_argument("--lease", type=float, default=1.0)
    parser.add_argument("--naive", action="store_true")
    options = parser.parse_args()
    breaker = None
    if not options.naive:
        breaker = CircuitBreaker(
            producer_client(options.redis),
            "provider",
            failures=options.failures,
            cooldown=options.cooldown,
            lease=options.lease,
        )
    async with httpx2.AsyncClient(timeout=60) as client:

        async def ask():
            answer = await client.post(options.provider, json={"pid": os.getpid()})
            if answer.status_code != 200:
                raise Transient(f"the provider answered {answer.status_code}")

        async def caller():
            while True:
                with contextlib.suppress(Transient, BreakerOpen, httpx2.HTTPError):
                    await (breaker.call(ask) if breaker else ask())
                await asyncio.sleep(0.02)  # a retry policy in a hurry

        print(json.dumps({"event": "ready", "pid": os.getpid()}), flush=True)
        await asyncio.gather(*(caller() for _ in range(options.callers)))


asyncio.run(main())
