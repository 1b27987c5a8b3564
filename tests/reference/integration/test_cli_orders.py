"""`studyhall order`, `saga`, `outbox` and `events` as a person or a script uses them, on both databases."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import typer
from sqlalchemy import select
from typer.testing import CliRunner

from harness.ports import free_port
from harness.waiting import until
from studyhall import cli_events, cli_orders, cli_saga
from studyhall.bus import open_bus
from studyhall.orders.consumers import GROUPS, inbox_name
from studyhall.orders.db import feed_entries
from studyhall.orders.events import TOPIC, OrderConfirmed
from studyhall.orders.events import types as order_types
from studyhall.orders.payments import Payments
from studyhall.orders.saga import buy_pack
from studyhall.patterns import outbox
from studyhall.patterns.core.errors import JobError, Permanent
from studyhall.patterns.core.event import MAX_BYTES, Event
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.event_schema import EventTypes
from studyhall.patterns.inbox import consumer
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.saga import SagaRunner

Command = Callable[..., Any]


class BrokenPayments(Payments):
    """A provider that takes money and can neither be asked nor refund it."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9")

    async def charge(self, key, **order):
        raise Permanent("garbled answer for ann@example.com")

    async def find(self, charge_key):
        return None

    async def refund(self, key, *, charge_key):
        raise Permanent("account closed")


@pytest.fixture
def studyhall(tmp_path, store_url, monkeypatch):
    """Run a command on its own data directory: parsed JSON if it prints any, else the result."""
    monkeypatch.setenv("DATABASE_URL", store_url)
    # The handler a command leaves writes to its closed output.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    app = typer.Typer()
    app.add_typer(cli_saga.app, name="saga")
    app.add_typer(cli_events.app, name="events")
    app.add_typer(cli_orders.order, name="order")
    app.add_typer(cli_orders.outbox, name="outbox")

    def command(*args, fails=0):
        result = CliRunner().invoke(app, [*args, "--data-dir", str(tmp_path)])
        if isinstance(result.exception, JobError):  # `studyhall` prints these as one line and exits with 1
            assert fails == 1, result.exception
            return str(result.exception)
        assert result.exit_code == fails, result.output
        return json.loads(result.output) if "--json" in args and not fails else result.output

    return command


def drive(store_url):
    async def go():
        store = open_store(store_url)
        never = RetryPolicy(base=0.01, cap=0.01, attempts=1)
        async with BrokenPayments() as payments:
            await SagaRunner(store, buy_pack(payments, charge=never, refund=never)).resume_due()
        await close(store)

    asyncio.run(go())


def test_order_is_bought_listed_and_shown(studyhall):
    assert "biology-101" in studyhall("order", "packs")
    bought = studyhall("order", "buy", "biology-101", "--seats", "2", "--id", "o1", "--json")
    assert (bought["id"], bought["status"], bought["amount_cents"]) == ("o1", "placed", 3800)
    assert studyhall("order", "buy", "biology-101", "--seats", "2", "--id", "o1", "--json") == bought
    assert [row["id"] for row in studyhall("order", "list", "--json")] == ["o1"]
    assert studyhall("order", "show", "o1", "--json")["steps"]["charge"] == "pending"
    assert "o1" in studyhall("order", "list")
    assert "pending" in studyhall("order", "show", "o1")
    assert studyhall("outbox", "status", "--json")["waiting"] == 1


def test_wrong_input_says_what_to_do(studyhall):
    assert "packs: biology-101" in studyhall("order", "buy", "nope", fails=1)
    assert "card_ok or one of" in studyhall("order", "buy", "biology-101", "--card", "gold", fails=2)
    assert "choose one of running" in studyhall("saga", "list", "--state", "lost", fails=2)
    assert "No saga has this id" in studyhall("saga", "show", "nope", fails=1)
    assert "there is no order" in studyhall("order", "show", "nope", fails=1)
    assert "exactly one of" in studyhall("saga", "repair", "x", "--note", "n", fails=2)
    assert "exactly one of" in studyhall("saga", "repair", "x", "--note", "n", "--retry", "--compensate", fails=2)
    assert "JSON object" in studyhall("saga", "repair", "x", "--note", "n", "--done", "a", "--result", "[", fails=2)
    assert "is `studyhall event-worker` running?" in studyhall("order", "buy", "biology-101", "--wait", "0.2", fails=1)


def test_stuck_saga_is_found_understood_and_repaired(studyhall, store_url):
    studyhall("order", "buy", "biology-101", "--id", "o1")
    drive(store_url)
    (stuck,) = studyhall("saga", "list", "--state", "needs_repair", "--json")
    assert stuck["id"] == "o1"
    assert "account closed" in stuck["error"]
    shown = studyhall("saga", "show", "o1", "--json")
    assert shown["history"][-1]["event"] == "needs repair"
    assert {step["name"]: step["state"] for step in shown["steps"]}["charge"] == "stuck"
    out = studyhall("saga", "show", "o1")
    assert "Timeline" in out
    assert "garbled" in out.replace("\n", "")
    assert "ann@example.com" not in out

    assert "mark the step undone" in studyhall("saga", "repair", "o1", "--done", "charge", "--note", "n", fails=1)
    repaired = studyhall("saga", "repair", "o1", "--undone", "charge", "--note", "bank paid it back", "--json")
    assert repaired["state"] == "compensating"
    drive(store_url)
    assert studyhall("order", "show", "o1", "--json")["status"] == "cancelled"
    assert studyhall("saga", "list", "--json")[0]["state"] == "compensated"
    assert "No saga waits for a human" in studyhall("saga", "list", "--state", "needs_repair")


def test_quarantined_event_is_listed_replayed_and_discarded(studyhall, store_url):
    studyhall("order", "packs")

    class Refusing:
        async def publish(self, events):
            return [Permanent("too odd") for _ in events]

    async def quarantine():
        store = open_store(store_url)
        async with begin(store) as tx:
            for subject in ("one", "two"):
                await outbox.add(tx, Event(id=subject, type="order.odd.v1", subject=subject, source="test"))
        await Relay(store, Refusing()).run_once()
        await close(store)

    asyncio.run(quarantine())
    assert [row["event_id"] for row in studyhall("outbox", "quarantine", "list", "--json")] == ["one", "two"]
    assert "too odd" in studyhall("outbox", "quarantine", "list").replace("\n", "")
    assert studyhall("outbox", "replay", "one", "--json") == {"replayed": 1}
    assert studyhall("outbox", "discard", "two", "--why", "test", "--json") == {"discarded": 1}
    assert "not in quarantine" in studyhall("outbox", "replay", "one", fails=1)
    assert studyhall("outbox", "status", "--json")["quarantined"] == 0


CONFIRMED = {
    "order_id": "o1",
    "pack_id": "biology-101",
    "pack_title": "Biology 101",
    "author": "bob",
    "customer": "ann",
    "seats": 1,
    "amount_cents": 1900,
}


def order_event(ident, kind="order.confirmed.v1", **data):
    return Event(id=ident, source="test", type=kind, subject=ident, data={**CONFIRMED, "order_id": ident, **data})


async def published_and_consumed(store_url, bus_url, events, types, groups):
    """Run a relay until nothing is left to do."""
    store = open_store(store_url)
    async with open_bus(bus_url) as bus:
        for group in groups:
            await bus.subscribe(group, [TOPIC])
        if events:
            async with begin(store) as tx:
                await outbox.add(tx, *events)
        while await Relay(store, bus).run_once():
            pass
        stop = asyncio.Event()
        tasks = [
            asyncio.create_task(
                bus.consume(group, [TOPIC], consumer(store, inbox_name(group), types, GROUPS[group]), stop=stop)
            )
            for group in groups
        ]

        async def through():
            return not any([await bus.lag(group) for group in groups])

        await until(through, 30, "every group to be through")
        stop.set()
        await asyncio.gather(*tasks)
    await close(store)


def feed_of(store_url):
    async def ask():
        store = open_store(store_url)
        async with read(store) as tx:
            orders = list(await tx.scalars(select(feed_entries.c.order_id).order_by(feed_entries.c.order_id)))
        await close(store)
        return orders

    return asyncio.run(ask())


def test_what_cannot_be_read_is_seen_with_its_reason_and_delivered_after_the_fix(
    studyhall, store_url, redis_url, monkeypatch
):
    monkeypatch.setenv("REDIS_URL", redis_url)
    studyhall("order", "packs")
    bad = [
        order_event("lost", "order.lost.v1"),
        order_event("newer", "order.confirmed.v2"),
        Event(id="short", source="test", type="order.confirmed.v1", subject="short", data={"seats": "many"}),
        order_event("huge", pack_title="x" * MAX_BYTES),
    ]
    groups = ("feed", "payouts")
    work = (store_url, redis_url)
    asyncio.run(published_and_consumed(*work, [order_event("good"), *bad], order_types, groups))
    assert feed_of(store_url) == ["good"]

    (huge,) = studyhall("outbox", "quarantine", "list", "--json")  # the bus would not take it
    assert huge["event_id"] == "huge"
    assert huge["reason"].startswith("too-large")
    rows = {row["event"]: row for row in studyhall("events", "quarantine", "--group", "feed", "--json")}
    assert set(rows) == {"lost", "newer", "short"}
    assert "order.lost" in rows["lost"]["reason"]
    assert "newer than v1" in rows["newer"]["reason"]
    assert "pack_title: Field required" in rows["short"]["reason"]
    assert all(row["tries"] == 1 for row in rows.values()), "asking again would not have helped"
    monkeypatch.setenv("COLUMNS", "200")
    assert "newer than v1" in studyhall("events", "quarantine")
    status = {row["group"]: row for row in studyhall("events", "status", "--json")}
    assert status["feed"] == {"group": "feed", "waiting": 0, "quarantined": 3}

    fixed = EventTypes()  # deployed since: v2 is v1 under a new name
    fixed.event("order.confirmed.v1")(OrderConfirmed)
    fixed.event("order.confirmed.v2")(OrderConfirmed)
    fixed.upcaster("order.confirmed.v1")(lambda old: old)
    monkeypatch.setattr("studyhall.orders.consumers.types", fixed)
    retried = studyhall("events", "retry", rows["newer"]["id"], "--group", "feed", "--json")
    assert retried == {"delivered": 1}
    asyncio.run(published_and_consumed(*work, [], fixed, groups))
    assert feed_of(store_url) == ["good", "newer"]
    left = studyhall("events", "quarantine", "--json")
    assert sorted((row["group"], row["event"]) for row in left) == [
        ("feed", "lost"),
        ("feed", "short"),
        *(("payouts", name) for name in ("lost", "newer", "short")),  # nobody else noticed
    ]
    assert "not in quarantine" in studyhall("events", "retry", "0-1", "--group", "feed", fails=1)
    studyhall("events", "retry", "--all", "--group", "payouts")
    asyncio.run(published_and_consumed(*work, [], fixed, groups))
    assert {row["event"] for row in studyhall("events", "quarantine", "--group", "payouts", "--json")} == {
        "lost",
        "short",
    }


def test_one_consumer_gets_the_past_again_by_command(studyhall, store_url, redis_url, monkeypatch):
    monkeypatch.setenv("REDIS_URL", redis_url)
    studyhall("order", "packs")
    sold = [order_event(f"o{n}") for n in range(3)]
    asyncio.run(published_and_consumed(store_url, redis_url, sold, order_types, ("payouts",)))
    assert feed_of(store_url) == []
    first = studyhall("events", "replay", "--group", "feed", "--event", "o1", "--json")
    assert (first["read"], first["applied"]) == (1, 1)
    since = ("--since", "2000-01-01")
    again = studyhall("events", "replay", "--group", "feed", *since, "--json")
    assert (again["read"], again["applied"], again["skipped"]) == (3, 2, 1)
    assert feed_of(store_url) == ["o0", "o1", "o2"]
    assert studyhall("events", "replay", "--group", "feed", "--before", "2000-01-01", "--json")["read"] == 0
    assert "say which" in studyhall("events", "replay", "--group", "feed", fails=2)
    assert "say which" in studyhall("events", "retry", "--group", "feed", fails=2)
    assert "choose one of notifications" in studyhall("events", "replay", *since, "--group", "x", fails=2)


def test_a_bus_that_is_away_is_one_line(studyhall, redis_url, monkeypatch):
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("STUDYHALL_BUS_URL", f"nats://127.0.0.1:{free_port()}")
    out = studyhall("events", "status", fails=1)
    assert "nats-jetstream does not answer, is it running?" in out
