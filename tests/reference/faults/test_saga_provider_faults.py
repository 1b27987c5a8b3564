"""Sagas against a provider that cuts answers, prints late and cannot refuse what comes late; runners are killed.

A customer cancels some of them, while they run and after they completed. In the end a completed saga has one label
that is valid, and one that was taken back has none. The twin does not wait before it looks a lost request up.
"""

import asyncio
import json
import random
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from harness.waiting import until
from studyhall.patterns.core.store import begin
from studyhall.patterns.saga import Saga, SagaRunner, SagaStep
from studyhall.patterns.saga import store as saga_store

pytestmark = pytest.mark.fault

PROGRAMS = Path(__file__).parent / "programs"
DONE = -1
LONGEST = 2.5  # the provider is slow for 1.8 s at most


async def _elsewhere(ctx):
    raise AssertionError("driven here")


class Parcels:
    def __init__(self, spawn, store, url, way, longest, **trouble):
        trouble["key_life"] = 600.0 if way == "keys" else 0.0
        provider = spawn(PROGRAMS / "misbehaving_provider.py", json.dumps(trouble))
        self.provider = f"http://127.0.0.1:{provider.line_sync('ready').split()[1]}"
        self.store = store
        spec = {"store": url, "provider": self.provider, "way": way, "longest": longest}
        self._start = lambda: spawn(PROGRAMS / "label_saga.py", json.dumps(spec))
        self.runners = [self._start() for _ in range(2)]
        nothing = SagaStep("label", _elsewhere)  # this process starts and cancels, it drives none
        self.here = SagaRunner(store, Saga("parcel", [nothing, SagaStep("hand-over", _elsewhere)]))

    def kill(self, number):
        """The process of this number, counted from 1."""
        self.runners[number - 1].kill()
        self.runners[number - 1] = self._start()

    async def start(self, saga_id, *, fails):
        async with begin(self.store) as tx:
            await self.here.start(tx, "parcel", saga_id, {"fails": fails})

    async def cancel(self, saga_id):
        async with begin(self.store) as tx:
            return await self.here.cancel(tx, saga_id, by="customer", reason="changed my mind")

    async def states(self):
        return {saga.id: saga.state for saga in await saga_store.list_sagas(self.store, limit=1_000)}

    async def ended(self):
        async def none_left():
            return not set((await self.states()).values()) & {"running", "compensating"}

        await until(none_left, 180, "every saga has ended", every=0.2)
        return await self.states()

    async def driver(self):
        """Which process holds a saga right now, if any; DONE when none is left to drive."""
        sagas = await saga_store.list_sagas(self.store, limit=1_000)
        for number, runner in enumerate(self.runners):
            if any(saga.owner and f":{runner.pid}:" in saga.owner for saga in sagas):
                return number + 1
        return None if any(saga.due_at for saga in sagas) else DONE

    def printed(self):
        with urllib.request.urlopen(f"{self.provider}/printed", timeout=20) as answer:  # loopback
            return list(json.load(answer)["printed"])

    def valid(self):
        return Counter(label["parcel"] for label in self.printed() if not label["void"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["look-up", "keys"])
async def test_killed_runners_of_cancelled_sagas_leave_one_valid_label_or_none(
    way, spawn, store, store_url, scale, seed, figures
):
    sagas, kills = scale((16, 5), (100, 40))
    parcels, rng = Parcels(spawn, store, store_url, way, LONGEST, seed=seed), random.Random(seed)
    ids = [f"parcel-{number}" for number in range(sagas)]
    for number, saga_id in enumerate(ids):
        await parcels.start(saga_id, fails=number % 4 == 0)
    cancelled = set(ids[1::4])
    killed = 0
    for _ in range(kills):
        victim = await until(parcels.driver, 60, "a runner holds a saga, or none is left")
        if victim == DONE:
            break
        parcels.kill(victim or 0)
        killed += 1
        for saga_id in [ident for ident in cancelled if rng.random() < 0.3]:
            await parcels.cancel(saga_id)
    await parcels.ended()
    for saga_id in cancelled:
        await parcels.cancel(saga_id)  # those that had completed
    states = await parcels.ended()
    wanted = {ident: "compensated" if n % 4 == 0 or ident in cancelled else "completed" for n, ident in enumerate(ids)}
    assert states == wanted
    valid = parcels.valid()
    assert valid == {saga_id: 1 for saga_id, state in states.items() if state == "completed"}
    figures(
        "saga",
        name=f"late-provider-{way}-{store.dialect.name}",
        sagas=sagas,
        kills=killed,
        cancelled=len(cancelled),
        labels=len(parcels.printed()),
        valid=valid.total(),
        completed=list(states.values()).count("completed"),
    )


@pytest.mark.slow
async def test_the_naive_twin_looks_a_lost_request_up_at_once_and_leaves_labels_behind(
    spawn, store, store_url, seed, figures
):
    parcels = Parcels(spawn, store, store_url, "look-up", 0.0, seed=seed, trouble=0.8)
    for number in range(24):
        await parcels.start(f"parcel-{number}", fails=number % 2 == 0)
    states = await parcels.ended()
    await asyncio.sleep(2.0)  # what the provider still prints
    valid = parcels.valid()
    right = {saga_id: int(state == "completed") for saga_id, state in states.items()}
    wrong = [saga_id for saga_id, count in right.items() if valid[saga_id] != count]
    assert wrong, "what `longest` is for"
    figures("saga", name=f"late-provider-naive-{store.dialect.name}", naive_sagas=len(states), naive_wrong=len(wrong))
