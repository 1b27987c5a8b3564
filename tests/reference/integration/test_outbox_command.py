"""The outbox and the schedules on the command line, and relays that drain like workers."""

import asyncio
import re
import sys

import pytest

from harness.waiting import clock_at
from studyhall.patterns import outbox
from studyhall.patterns.core.clock import Periodic
from studyhall.patterns.core.errors import Permanent, Transient
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.outbox import command as outbox_command
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.schedule import command as schedule_command
from studyhall.patterns.schedule.history import note_start
from studyhall.patterns.schedule.slots import Tick
from studyhall.patterns.shutdown import run_until_signalled

DAY = 86_400_000


@pytest.fixture
def database(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 's.db'}"
    monkeypatch.setenv("DATABASE_URL", url)
    return url


def with_store(url, work):
    async def run():
        store = open_store(url)
        await create_all(store)
        try:
            return await work(store)
        finally:
            await close(store)

    return asyncio.run(run())


class Receiver:
    """Refuses what `refuses` names."""

    def __init__(self, *refuses):
        self.refuses, self.took = refuses, list[str]()

    async def publish(self, events):
        self.took += [event.id for event in events if event.id not in self.refuses]
        return [Permanent("refused with 400") if event.id in self.refuses else None for event in events]


async def delivered(store, receiver):
    """By a relay that runs beside other work until it is stopped, as in a service."""
    stop = asyncio.Event()

    async def enough():
        if await relay.run_once() == 0:
            stop.set()

    relay = Relay(store, receiver, destination="crm")
    async with asyncio.timeout(20):
        await run_until_signalled([relay, Periodic("enough", enough, every=0.05)], grace=5, stop=stop)


def test_what_a_receiver_refused_is_listed_retried_in_its_place_and_discarded(database, capsys):
    async def add(store):
        made = [Event(id=ident, source="/", type="a.b.v1", subject="s") for ident in ("one", "two", "three")]
        async with begin(store) as tx:
            await outbox.add(tx, *made, to=["crm"])

    with_store(database, add)
    first, second = Receiver("one"), Receiver("two")
    with_store(database, lambda store: delivered(store, first))
    assert first.took == [], "what comes after the refused one waits"
    assert outbox_command.main([]) == 0
    out = capsys.readouterr().out
    assert "crm: 2 waiting" in out
    assert "1 set aside" in out
    assert "one  Permanent: refused with 400  (2 wait behind it)" in out
    assert outbox_command.main(["retry", "crm", "one"]) == 0
    with_store(database, lambda store: delivered(store, second))
    assert second.took == ["one"]
    assert outbox_command.main(["discard", "crm", "two", "nothing"]) == 1
    assert "1 of these were not set aside" in capsys.readouterr().err
    with_store(database, lambda store: delivered(store, second))
    assert second.took == ["one", "three"]
    with pytest.raises(SystemExit):
        outbox_command.main(["retry", "crm"])
    assert "retry which?" in capsys.readouterr().err


def test_every_failed_delivery_says_when_it_comes_again(database, caplog):
    """Without a line nobody notices a receiver that answers 500 for hours."""
    caplog.set_level("INFO", "outbox")

    class Failing:
        async def publish(self, events):
            return [Transient("500")] * len(events)

    async def fail(store):
        async with begin(store) as tx:
            await outbox.add(tx, Event(id="one", source="/", type="a.b.v1", subject="s"), to=["crm"])
        await Relay(store, Failing(), destination="crm").run_once()

    with_store(database, fail)
    assert re.search(r"event one \(s\), again in \d+\.\d s: Transient: 500", caplog.text)


def test_slots_that_nobody_ran_are_listed(database, capsys, monkeypatch):
    async def three_days_later(store):
        for day in (20_000, 20_003):
            tick = Tick("nightly", day * DAY, {"id": "nightly", "cron": "0 0 * * *"})
            await note_start(store, tick, clock_at(day * DAY))

    with_store(database, three_days_later)
    monkeypatch.setattr(sys, "argv", ["schedule"])
    schedule_command.main()
    assert capsys.readouterr().out.splitlines() == [
        "nightly: last 2024-10-07 00:00:00 UTC, 2 ran, 2 missed, 0 skipped",
        "  missed 2024-10-06 00:00:00 UTC",
        "  missed 2024-10-05 00:00:00 UTC",
    ]
