"""Redis killed and frozen under a running API: reads go on, writes answer in time, nothing accepted is lost."""

import asyncio
import time
from pathlib import Path

import pytest

from harness.api import api_at
from harness.waiting import until

pytestmark = pytest.mark.fault
TEXT = (Path(__file__).parents[3] / "reference" / "samples" / "water-cycle.md").read_bytes()
LIMIT = 2.0


async def timed(times, request):
    began = time.monotonic()
    response = await request
    times.append(time.monotonic() - began)
    return response


async def upload(api):
    return await api.client.post("/documents", files={"file": ("water.md", TEXT)})


@pytest.mark.slow
@pytest.mark.parametrize("away", ["killed", "frozen"])
async def test_reads_go_on_and_writes_answer_in_time_while_redis_is_away(away, spawn, own_redis, tmp_path, figures):
    async with api_at(spawn, tmp_path, own_redis.url) as api:
        await api.worker()
        before = (await upload(api)).json()

        async def through(document):
            shown = (await api.client.get(document["href"])).json()
            return all(stage["state"] == "completed" for stage in shown["stages"])

        await until(lambda: through(before), 60, "the first document is through", every=0.1)
        await asyncio.to_thread(own_redis.kill if away == "killed" else own_redis.pause)
        times = []
        shown = await timed(times, api.client.get(before["href"]))
        assert shown.json()["quiz"]["questions"], "results are in the database"
        assert {stage["state"] for stage in shown.json()["stages"]} == {"unknown"}
        for path in ("/documents", "/orders", "/packs", "/healthz"):
            assert (await timed(times, api.client.get(path))).status_code == 200
        accepted = [await timed(times, upload(api)) for _ in range(3)]
        assert {answer.status_code for answer in accepted} == {202}, "into the database"
        order = await timed(times, api.client.post("/orders", json={"pack_id": "biology-101"}))
        assert order.status_code == 201, "an order needs no Redis"
        refused = await timed(times, api.admin.get("/admin/queues?"))
        slow_one = times.pop()  # has a limit of its own
        assert slow_one < 6
        assert refused.status_code == 503
        assert refused.json()["type"].endswith("queue-unavailable")
        assert refused.headers["retry-after"]
        ready = await api.client.get("/readyz")
        assert ready.status_code == 503
        assert "redis" in ready.json()["problems"]
        assert "redis_up 0" in (await api.client.get("/metrics")).text
        assert max(times) < LIMIT + 1.0, "2 s, and a second for a loaded machine"
        await asyncio.to_thread(own_redis.restart if away == "killed" else own_redis.resume)
        done = 0
        for answer in accepted:
            await until(lambda answer=answer: through(answer.json()), 60, "what was accepted is done", every=0.2)
            done += 1
        assert (await api.client.get("/readyz")).status_code == 200
    figures(
        "degraded",
        name=f"API, Redis {away}",
        requests=len(times),
        slowest_ms=round(1000 * max(times)),
        accepted=len(accepted),
        lost=len(accepted) - done,
    )


@pytest.mark.slow
async def test_the_api_starts_while_redis_is_away_and_survives_its_own_kill(spawn, own_redis, tmp_path):
    async with api_at(spawn, tmp_path, own_redis.url) as api:
        await asyncio.to_thread(own_redis.kill)
        api.process.kill()
        await api.start()
        made = (await upload(api)).json()
        api.process.kill()
        await asyncio.to_thread(own_redis.restart)
        await api.start()
        await api.worker()

        async def through():
            shown = (await api.client.get(made["href"])).json()
            return all(stage["state"] == "completed" for stage in shown["stages"])

        await until(through, 60, "accepted without Redis, by a process that was killed: done", every=0.2)
