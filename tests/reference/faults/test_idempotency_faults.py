"""Idempotency under kill -9: our inbox and, in the same test, the naive versions that lose and duplicate."""

import asyncio
import json
import uuid
from collections import Counter
from pathlib import Path

import httpx2
import pytest
from bullmq import Queue
from sqlalchemy import text

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Transient
from studyhall.patterns.core.job import provider_key
from studyhall.patterns.core.store import begin, is_postgres, read
from studyhall.patterns.idempotency import Inbox, KeyReused, fingerprint

VICTIMS = Path(__file__).parent / "programs" / "idempotency_victims.py"
WAYS = ("inbox", "set-nx", "set-nx-del")
EMAILS = "CREATE TABLE victim_emails (id {}, way TEXT NOT NULL, key TEXT NOT NULL)"

pytestmark = pytest.mark.fault


async def kill_consumers(store, urls, spawn, *, kills, events, seed):
    """For each way of being idempotent: deaths by point, events lost, effects too many."""
    store_url, redis_url = urls
    serial = "SERIAL PRIMARY KEY" if is_postgres(store) else "INTEGER PRIMARY KEY"
    async with begin(store) as tx:
        await tx.execute(text(EMAILS.format(serial)))
    errors = {3: "early", 7: "late"}  # one in ten of each kind
    keys = [f"order-{n}" for n in range(events)]
    async with producer_client(redis_url) as redis:
        for way in WAYS:
            waiting = [{"way": way, "key": key, "error": errors.get(n % 10)} for n, key in enumerate(keys)]
            await redis.rpush(f"{way}:events", *map(json.dumps, waiting))
        child = spawn(VICTIMS, store_url, redis_url, kills, seed)
        deaths = json.loads((await child.line("deaths ", 180)).removeprefix("deaths "))
    async with read(store) as connection:
        sent = (await connection.execute(text("SELECT way, key FROM victim_emails"))).all()
    outcome = {}
    for way in WAYS:
        times = Counter(row.key for row in sent if row.way == way)
        outcome[way] = (Counter(deaths[way]), len(set(keys) - set(times)), times.total() - len(times))
    return outcome


@pytest.mark.slow
async def test_killed_consumers_lose_and_duplicate_nothing_while_set_nx_does_both(
    *, store, store_url, redis_url, spawn, scale, seed, figures
):
    kills, events = scale(12, 48), scale(60, 240)
    outcome = await kill_consumers(store, (store_url, redis_url), spawn, kills=kills, events=events, seed=seed)
    deaths, lost, duplicated = outcome["inbox"]
    figures(
        "idempotency",
        name=f"kills-{store_url.split(':', maxsplit=1)[0]}",
        events=events,
        kills=deaths.total(),
        kills_by_point=dict(deaths),
        lost=lost,
        duplicated=duplicated,
        naive_set_nx_lost=outcome["set-nx"][1],
        naive_set_nx_del_lost=outcome["set-nx-del"][1],
        naive_set_nx_del_duplicated=outcome["set-nx-del"][2],
    )
    assert deaths.total() >= kills * 0.8, f"too few deaths to prove anything: {deaths}"
    assert {"taken", "in the effect", "effect done"} <= set(deaths)
    assert (lost, duplicated) == (0, 0)
    assert outcome["set-nx"][1] > 0, "the fault did not happen: SET NX lost nothing"
    assert outcome["set-nx-del"][1] > 0, "the fault did not happen: SET NX with DEL lost nothing"
    assert outcome["set-nx-del"][2] > 0, "the fault did not happen: SET NX with DEL duplicated nothing"


async def test_a_key_made_of_the_job_id_gives_one_customer_the_others_result(store, redis_url):
    """BullMQ's ids are counters per queue: the first job of every queue is job 1."""
    async with producer_client(redis_url) as redis:
        ann = await Queue("invoices", {"connection": redis}).add("pay", {"customer": "ann", "key": "invoice-7"})
        bob = await Queue("refunds", {"connection": redis}).add("pay", {"customer": "bob", "key": "refund-3"})
        assert ann.id == bob.id == "1"

        async def naive(job):
            if stored := await redis.get(f"result:{job.id}"):
                return stored
            await redis.set(f"result:{job.id}", f"receipt of {job.data['customer']}")
            return f"receipt of {job.data['customer']}"

        assert [await naive(ann), await naive(bob)] == ["receipt of ann", "receipt of ann"], "bob got ann's"

    inbox = Inbox(store, "payments")

    async def with_key(job, key):
        async def effect(_tx):
            return f"receipt of {job.data['customer']}"

        return await inbox.once(key, fingerprint(job.data), effect)

    assert await with_key(ann, ann.data["key"]) == "receipt of ann"
    assert await with_key(bob, bob.data["key"]) == "receipt of bob"
    # Whoever uses the job id anyway gets an error, not somebody else's receipt.
    await with_key(ann, ann.id)
    with pytest.raises(KeyReused):
        await with_key(bob, bob.id)


async def test_a_charge_whose_answer_is_lost_is_charged_once_with_a_provider_key(
    store, spawn, tmp_path, figures, store_url
):
    """The payment happens, the connection drops, the job is tried again. Naive: a new key for every try."""
    server = spawn("studyhall.payment_sandbox", "--port", 0, "--data-dir", tmp_path)
    url = json.loads(await server.line('"url"'))["url"]
    inbox = Inbox(store, "charges")

    async with httpx2.AsyncClient(base_url=url, timeout=5) as http:

        async def charge(key, customer):
            body = {"amount": 990, "currency": "EUR", "customer": customer, "method": "card"}
            try:
                answer = await http.post("/v1/charges", json=body, headers={"Idempotency-Key": key})
            except httpx2.TransportError as error:
                raise Transient("no answer from the payment provider") from error
            assert answer.status_code in (200, 201), answer.text
            return str(answer.json()["id"])

        async def attempt(customer, make_key):
            """One run of the job: look, charge outside the transaction, record."""
            mark = fingerprint({"customer": customer})
            if stored := await inbox.seen(customer, mark):
                return str(stored.result)
            return str(await inbox.record(customer, mark, await charge(make_key(), customer)))

        async def with_retries(customer, make_key):
            fault = {"kind": "lost-answer", "operation": "charge", "times": 1}
            (await http.post("/admin/faults", json=fault)).raise_for_status()
            with pytest.raises(Transient):
                await attempt(customer, make_key)
            return await attempt(customer, make_key)

        await with_retries("naive", lambda: str(uuid.uuid4()))
        receipt = await with_retries("ours", lambda: provider_key("order-1", "charge"))
        assert await attempt("ours", lambda: provider_key("order-1", "charge")) == receipt
        ledger = (await http.get("/admin/ledger")).json()
    charges = Counter(row["customer"] for row in ledger["charges"])
    figures(
        "idempotency",
        name=f"lost-answer-{store_url.split(':', maxsplit=1)[0]}",
        charges=charges["ours"],
        naive_charges=charges["naive"],
    )
    assert charges["naive"] == 2, "the fault did not happen"
    assert charges["ours"] == 1


async def test_fifty_at_once_without_an_inbox_make_fifty_effects(store):
    """The twin of the test with 50 concurrent duplicates: look first, then act, as it is usually written."""
    async with begin(store) as tx:
        await tx.execute(text("CREATE TABLE seen_before (key TEXT)"))

    async def naive():
        async with read(store) as connection:
            if (await connection.execute(text("SELECT 1 FROM seen_before WHERE key = 'k'"))).first():
                return False
        async with begin(store) as tx:
            await tx.execute(text("INSERT INTO seen_before VALUES ('k')"))
        return True

    assert sum(await asyncio.gather(*(naive() for _ in range(50)))) > 1, "the fault did not happen"
    ran = []
    inbox = Inbox(store, "fifty")

    async def ours(number):
        async def effect(_tx):
            ran.append(number)
            return number

        return int(await inbox.once("k", fingerprint("k"), effect))

    results = await asyncio.gather(*(ours(number) for number in range(50)))
    assert len(ran) == 1
    assert results == ran * 50
