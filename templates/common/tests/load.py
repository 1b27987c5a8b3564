{@% set process = 'relay' if kind == 'event-driven' else 'worker' %@}
"""make load: what this machine carries, and where it saturates. Each step doubles the requests per second.

One API and one {@ process @}, on an embedded Redis and the database of DATABASE_URL (else SQLite), all in their own
folder. The example's work takes no time, so this measures everything around it; put yours in and run it again.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx2

from {@ package @}.settings import PREFIX

from .example import BODY, URL
from .processes import Processes, until
from .test_stop import answers, free_port

SECONDS = 3  # per step
MOST = 12_800  # requests a second
SLOW = 1.0  # seconds: an answer, or an end after the last request, that takes longer is too late
ENDED = {{@ '"confirmed", "cancelled"' if kind == 'event-driven' else '"completed", "failed"' @}}


async def step(client: httpx2.AsyncClient, rate: int) -> tuple[list[float], int, float]:
    """Sends at this rate, answered or not: (seconds of each answer, refused, seconds until all is done)."""
    took: list[float] = []
    places: list[str] = []
    began = time.monotonic()

    async def ask() -> None:
        asked = time.monotonic()
        try:
            answer = await client.post(URL, json=BODY)
            answer.raise_for_status()
        except httpx2.HTTPError:
            return
        took.append(time.monotonic() - asked)
        places.append(answer.headers["location"])

    tasks = []
    for number in range(rate * SECONDS):
        await asyncio.sleep(began + number / rate - time.monotonic())
        tasks.append(asyncio.create_task(ask()))
    await asyncio.gather(*tasks)
    for place in [*places[:: max(1, len(places) // 20)], *places[-20:]]:  # a sample, and the last ones
        while (await client.get(place)).json()["{@ 'status' if kind == 'event-driven' else 'state' @}"] not in ENDED:
            await asyncio.sleep(0.02)
    return took, rate * SECONDS - len(took), time.monotonic() - began


async def climb(port: int, most: int) -> None:
    print("asked/s  answered  refused  p50 ms  p99 ms  done/s")
    carried, rate = 0.0, 25
    limits = httpx2.Limits(max_connections=200)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits) as client:
        await step(client, 5)  # everything is imported and connected
        while rate <= most:
            took, refused, seconds = await step(client, rate)
            p50, p99 = (1000 * statistics.quantiles(took or [0, 0], n=100)[n] for n in (49, 98))
            done = len(took) / seconds
            print(f"{rate:7}  {len(took):8}  {refused:7}  {p50:6.0f}  {p99:6.0f}  {done:6.0f}", flush=True)
            behind = seconds - SECONDS
            if refused or p99 > 1000 * SLOW or behind > SLOW:
                why = f"the {@ process @} is {behind:.1f} s behind" if behind > SLOW else "the API answers too late"
                why = f"{refused} were refused" if refused else why
                shown = f"{carried:g}" if carried else f"fewer than {rate}"
                print(f"carries {shown} requests a second; saturated at {rate}: {why}")
                return
            carried, rate = rate, rate * 2
    print(f"carries {carried:g} requests a second, and was asked for no more")


def main() -> None:
    most = int(sys.argv[1]) if sys.argv[1:] else MOST
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Redis may still be stopping
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        own = {"PYTHONPATH": str(Path(__file__).parents[1] / "src"), f"{PREFIX}DATA_DIR": f"{folder}/data"}
        processes = Processes({**inherited, **own}, Path(folder))
        port = free_port()
        try:
            processes.start(
                "-m",
                "{@ package @}",
                "run",
                port=port,
{@% if kind != 'event-driven' %@}
                step_seconds=0,
{@% endif %@}
                log_level="error",
            )
            until(lambda: answers(port), "service that is ready", 60)
            asyncio.run(climb(port, most))
        finally:
            processes.end()


if __name__ == "__main__":
    main()
