"""Calls to a provider that cuts, delays and refuses, from workers that are killed and frozen, with Redis away.

Each parcel is one call. The provider counts what it printed: 0 duplicated, 0 lost, or listed for a human.
"""

import asyncio
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from harness.processes import Spawned
from harness.redis import RedisServer
from harness.waiting import until
from harness.workers import queue_at
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.outside_call import InFlight, OutsideCalls, Unclear, check_status
from studyhall.patterns.outside_call.redis_ledger import RedisLedger
from studyhall.patterns.outside_call.store import StoreLedger

pytestmark = pytest.mark.fault

PROGRAMS = Path(__file__).parent / "programs"
WORKERS = 3


class Provider:
    def __init__(self, spawn, **spec):
        self.process = spawn(PROGRAMS / "misbehaving_provider.py", json.dumps(spec))
        self.url = f"http://127.0.0.1:{self.process.line_sync('ready').split()[1]}"

    def state(self):
        with urllib.request.urlopen(f"{self.url}/printed", timeout=20) as answer:  # loopback
            return json.load(answer)

    def printed(self):
        return Counter(label["parcel"] for label in self.state()["printed"])


class Fleet:
    """Workers that are killed while their calls are under way, and replaced."""

    def __init__(self, spawn, spec):
        self._start: Callable[[], Spawned] = lambda: spawn(PROGRAMS / "label_worker.py", json.dumps(spec))
        self.workers = [self._start() for _ in range(WORKERS)]

    def kill(self, number):
        self.workers[number].kill()
        self.workers[number] = self._start()


async def under_fire(spawn, redis, provider, spec, *, calls, kills, freezes, away, seed):
    """Have `calls` labels printed under every fault; the jobs by parcel, when all have ended."""
    rng = random.Random(seed)
    fleet = Fleet(spawn, spec)
    faults = ["kill"] * kills + ["freeze"] * freezes + ["away"] * (1 if away else 0)
    rng.shuffle(faults)
    parcels = [f"parcel-{number}" for number in range(calls)]
    async with queue_at(redis.url, "labels") as queue:
        for number, fault in enumerate(faults):
            before = provider.state()["requests"]
            # As another program writes them: no envelope, no attempts. Some of each batch for every fault.
            for parcel in parcels[number * calls // len(faults) : (number + 1) * calls // len(faults)]:
                await queue.add("print", {"parcel": parcel}, {"jobId": parcel})
            await until(
                lambda before=before: provider.state()["requests"] > before, 60, "calls are under way", every=0.01
            )
            await asyncio.sleep(rng.uniform(0, 0.1))
            victim = rng.randrange(WORKERS)
            if fault == "kill":
                fleet.kill(victim)
            elif fault == "freeze":
                fleet.workers[victim].stop_signal()
                await asyncio.sleep(4.5)  # the fault itself: longer than the lock and than `longest`
                fleet.workers[victim].cont()
            else:
                await asyncio.to_thread(redis.kill)
                await asyncio.sleep(away)
                await asyncio.to_thread(redis.restart)
        with redis.client() as client:

            def ended():
                return bool(client.zcard("bull:labels:completed") + client.zcard("bull:labels:failed") == calls)

            def left():
                states = {name: client.hgetall(f"bull:labels:{name}") for name in parcels}
                return f"all jobs ended; left: {[job for job in states.values() if 'finishedOn' not in job][:3]}"

            await until(ended, 180, left, every=0.1)
            jobs = {name: client.hgetall(f"bull:labels:{name}") for name in parcels}
    for worker in fleet.workers:
        worker.terminate()
    for worker in fleet.workers:
        await worker.exited(30)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "ledger"),
    [("keys", "store"), ("look-up", "store"), ("both", "redis"), ("neither", "store")],
    ids=["keys", "look-up", "both-in-redis", "neither"],
)
async def test_killed_callers_of_a_bad_provider_duplicate_nothing_and_lose_nothing(
    way, ledger, spawn, tmp_path, figures, scale, seed
):
    calls, kills, freezes, away = scale((60, 8, 1, 3.0), (300, 40, 5, 12.0))
    redis = RedisServer.start(appendfsync="always")
    try:
        key_life = 600.0 if way in ("keys", "both") else 0.0
        provider = Provider(spawn, seed=seed, key_life=key_life)
        where = "redis" if ledger == "redis" else f"sqlite:///{tmp_path / 'calls.db'}"
        spec = {"way": way, "redis": redis.url, "provider": provider.url, "ledger": where}
        began = time.monotonic()
        jobs = await under_fire(
            spawn, redis, provider, spec, calls=calls, kills=kills, freezes=freezes, away=away, seed=seed
        )
        seconds = time.monotonic() - began
        printed = provider.printed()
        unclear = await resolved_by_hand(where, redis, provider)
    finally:
        redis.stop()
    duplicated = [parcel for parcel, count in printed.items() if count > 1]
    failed = {parcel for parcel, job in jobs.items() if "failedReason" in job and "returnvalue" not in job}
    assert duplicated == []
    assert Counter(call.key.removeprefix("label/") for call in unclear) == Counter(failed), (
        "each is listed once, and nothing else failed"
    )
    assert all("Unclear" in jobs[parcel]["failedReason"] for parcel in failed)
    lost = [parcel for parcel in jobs if parcel not in printed and parcel not in failed]
    assert lost == []
    if way != "neither":
        assert failed == set()
    labels = {label["parcel"]: label["label"] for label in provider.state()["printed"]}
    answers = {p: json.loads(job["returnvalue"])["label"] for p, job in jobs.items() if p not in failed}
    assert answers == {parcel: labels[parcel] for parcel in answers}, "no paid answer was thrown away"
    figures(
        "outside-call",
        name=way,
        calls=calls,
        kills=kills,
        freezes=freezes,
        redis_away_seconds=away,
        requests=provider.state()["requests"],
        duplicated=len(duplicated),
        lost=len(lost),
        unclear=len(unclear),
        seconds=round(seconds),
    )


async def resolved_by_hand(where, redis, provider):
    """A human looks at the provider's website, for each call that is listed."""
    store = None if where == "redis" else open_store(where)
    client = producer_client(redis.url)
    calls = OutsideCalls(StoreLedger(store) if store else RedisLedger(client), "carrier", longest=1)
    listed = await calls.unclear(1_000)
    for call in listed:
        made = [label for label in provider.state()["printed"] if label["reference"] == call.provider_key]
        if made:
            await calls.resolve(call.key, done={"label": made[0]["label"]})
        else:
            await calls.resolve(call.key, again=True)
    assert await calls.unclear() == []
    await client.aclose()
    if store:
        await close(store)
    return listed


async def test_the_naive_twin_with_a_key_and_retries_duplicates(spawn, own_redis, figures, scale, seed):
    """The provider knows the key only once the label is printed: a retry that overtakes a slow request prints again."""
    calls, kills = scale((60, 3), (300, 40))
    provider = Provider(spawn, seed=seed, key_life=600)
    spec = {"way": "naive", "redis": own_redis.url, "provider": provider.url, "ledger": "redis"}
    await under_fire(spawn, own_redis, provider, spec, calls=calls, kills=kills, freezes=0, away=0.0, seed=seed)
    printed = provider.printed()
    duplicated = [parcel for parcel, count in printed.items() if count > 1]
    assert duplicated, "what this pattern is for"
    figures(
        "outside-call",
        name="naive",
        calls=calls,
        kills=kills,
        naive_duplicated=len(duplicated),
        naive_labels=printed.total(),
    )


async def test_a_replay_after_the_provider_forgot_the_key_is_not_made_again(spawn, tmp_path, figures):
    provider = Provider(spawn, key_life=0.3, trouble=0.0)
    store = open_store(f"sqlite:///{tmp_path / 'calls.db'}")
    await create_all(store)
    calls = OutsideCalls(StoreLedger(store), "carrier", longest=0.2, key_life=0.3)
    async with httpx2.AsyncClient(base_url=provider.url, timeout=20) as client:

        async def send(key, parcel="ours"):
            body = {"parcel": parcel, "reference": key}
            answer = await client.post("/labels", json=body, headers={"idempotency-key": key})
            check_status(answer.status_code)
            return answer.json()

        async def cut(key):
            await send(key, "lost")
            raise ConnectionResetError("the answer was lost")

        async def naive():
            body = {"parcel": "naive", "reference": "naive"}
            return (await client.post("/labels", json=body, headers={"idempotency-key": "naive"})).json()

        first = await calls.once("replayed", send), await naive()
        with pytest.raises(InFlight) as lost:
            await calls.once("lost", cut)
        await asyncio.sleep(lost.value.delay + 0.05)  # past the life of every key
        assert (await calls.once("replayed", send), await naive()) != first
        assert await calls.once("replayed", send) == first[0]
        with pytest.raises(Unclear):
            await calls.once("lost", send)
    printed = provider.printed()
    assert printed == {"ours": 1, "lost": 1, "naive": 2}
    await close(store)
    figures("outside-call", name="key forgotten", labels=printed["ours"], naive_labels=printed["naive"])
