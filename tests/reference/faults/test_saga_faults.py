"""The saga under SIGKILL, SIGSTOP, lost answers and outages, beside the saga as it is usually written.

Orders buy a study pack: place → reserve seats → charge (another process, over HTTP) → confirm. What counts
in the end is whether money, seats, order and events agree.
"""

import itertools
import json
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx2
import pytest
import pytest_asyncio
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from harness.processes import spawn_python
from harness.waiting import until
from studyhall.orders import service
from studyhall.orders.db import orders, packs, seat_reservations
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.outbox import outbox
from studyhall.patterns.saga import repair as saga_repair
from studyhall.patterns.saga import store as saga_store

pytestmark = pytest.mark.fault

PROGRAM = Path(__file__).parent / "programs" / "saga_victims.py"
STEPS = ("place-order", "reserve-seats", "charge", "confirm")
DO = ("before intent", "after intent", "after effect", "after record")
UNDO = ("before undo intent", "after undo intent", "after undo effect", "after undo record")
PRICE = 1000
Death = tuple[str, str]


@dataclass
class VictimRun:
    """A plan that is being performed, and what its processes said."""

    log: Path

    def lines(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    async def line(self, text, timeout=20):
        line_with = lambda: next((line for line in self.lines() if text in line), None)  # noqa: E731
        try:
            return str(await until(line_with, timeout, what=f"a line with {text!r}"))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self}") from None

    def __str__(self):
        return "\n".join(self.lines())


@dataclass
class Shop:
    """A store, a payment provider in its own process, and what they say about each order."""

    store: AsyncEngine
    url: str
    payment: str
    directory: Path
    placed: int = 0

    async def place(self, customer, *, method="card_ok", pack="pack", naive=False):
        """Every order has its own customer, so that a charge under a second key would be seen."""
        self.placed += 1
        order_id = f"{'naive' if naive else 'order'}-{self.placed:03}"
        async with begin(self.store) as tx:
            await service.place_order(
                tx, pack_id=pack, customer=f"{customer}/{order_id}", seats=2, method=method, order_id=order_id
            )
            if naive:  # the twin has no durable saga
                await tx.execute(saga_store.sagas.delete().where(saga_store.sagas.c.id == order_id))
        return order_id

    @property
    def kind(self):
        return self.store.dialect.name

    def victims(self, victims, **plan):
        usual = {"mode": "saga", "deadline": 20.0, "margin": 20.0, "timeout": 8.0, "patience": 60.0}
        plan = {**usual, "store": self.url, "payment": self.payment, "victims": list(victims), **plan}
        path = self.directory / f"plan-{uuid4().hex}.json"
        path.with_suffix(".part").write_text(json.dumps(plan))
        path.with_suffix(".part").rename(path)
        return VictimRun(path.with_suffix(".log"))

    async def endings(self, running):
        await running.line("all ended", timeout=90)
        lines = [json.loads(line) for line in running.lines() if line.startswith("{")]
        return Counter(line["ended"] for line in lines if "ended" in line)

    async def finish(self, processes=1, **plan):
        """Processes that live on resume every saga until none is due."""
        rest = {"saga_id": None, "signal": None}
        running = self.victims([dict(rest) for _ in range(processes)], **plan)
        assert await self.endings(running) == {"exit 0": processes}, str(running)

    async def end_leases(self):
        """Let the leases of the dead run out: they are long, so that load ends none."""
        async with begin(self.store) as tx:
            held = saga_store.sagas.update().where(saga_store.sagas.c.owner.is_not(None))
            await tx.execute(held.values(due_at=0.0))

    async def fault(self, kind, operation="charge", times=1, seconds=1.0):
        async with httpx2.AsyncClient(base_url=self.payment) as http:
            body = {"kind": kind, "operation": operation, "times": times, "seconds": seconds}
            (await http.post("/admin/faults", json=body)).raise_for_status()

    async def ledger(self):
        async with httpx2.AsyncClient(base_url=self.payment, timeout=20) as http:
            return dict((await http.get("/admin/ledger")).raise_for_status().json())

    async def landed(self, fault):
        """Has the provider handled the request it was slow with?"""
        return all(call["status"] for call in (await self.ledger())["calls"] if call["fault"] == fault)

    async def charge_calls(self):
        return len([call for call in (await self.ledger())["calls"] if call["operation"] == "charge"])

    async def starts(self, order_ids):
        """How often each step was started, and by whom."""
        started = [
            (order_id, row)
            for order_id in order_ids
            for row in await saga_store.history(self.store, order_id)
            if row.event == "started"
        ]
        return Counter((order_id, str(row.step)) for order_id, row in started), {row.actor for _, row in started}

    async def saga(self, order_id):
        return await saga_store.load(self.store, order_id)

    async def events(self, order_id):
        return [(row.step, row.event) for row in await saga_store.history(self.store, order_id)]

    async def disagreements(self):
        """By order: where status, money, seats and events disagree."""
        ledger = await self.ledger()
        async with read(self.store) as tx:
            rows = (await tx.execute(select(orders))).mappings().all()
            reserved = {row.order_id for row in (await tx.execute(select(seat_reservations))).all()}
            events = Counter((row.subject, row.type) for row in (await tx.execute(select(outbox))).all())
        refunded = {row["charge_key"] for row in ledger["refunds"] if row["status"] == "refunded"}
        wrong_orders = {}
        for row in rows:
            charges = [c for c in ledger["charges"] if c["customer"] == row["customer"] and c["status"] == "succeeded"]
            kept = sum(c["amount"] for c in charges if c["key"] not in refunded)
            good = row["status"] == "confirmed"
            story = {
                "status": row["status"] in ("confirmed", "cancelled"),
                "charged once": len(charges) == 1 if good else len(charges) <= 1,
                "money": kept == (row["amount_cents"] if good else 0),
                "seats": (row["id"] in reserved) == good,
                "confirmed event": events[row["id"], "order.confirmed.v1"] == int(good),
                "cancelled event": events[row["id"], "order.cancelled.v1"] == int(not good),
            }
            if wrong := [name for name, right in story.items() if not right]:
                wrong_orders[row["id"]] = f"{row['status']}, kept {kept}: wrong {', '.join(wrong)}"
        return wrong_orders

    async def seats_add_up(self):
        async with read(self.store) as tx:
            held = select(func.coalesce(func.sum(seat_reservations.c.seats), 0))
            held = held.where(seat_reservations.c.pack_id == packs.c.id).scalar_subquery()
            wrong = select(packs.c.id).where(packs.c.seats - packs.c.seats_free != held)
            return (await tx.execute(wrong)).first() is None


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Where plans are put; the process that performs them is started once and forks from then on."""
    directory = tmp_path_factory.mktemp("stage")
    program = spawn_python(PROGRAM, directory, log=directory / "program.log")
    program.line_sync("ready")
    yield directory
    program.close()


@pytest_asyncio.fixture
async def shop(store, store_url, stage, spawn, tmp_path):
    sandbox = spawn("studyhall.payment_sandbox", "--data-dir", tmp_path / "payments")
    url = json.loads(await sandbox.line('"url"'))["url"]
    async with begin(store) as tx:
        for pack, seats in (("pack", 10_000), ("sold-out", 1)):
            await service.add_pack(tx, pack, title=pack, author="author", price_cents=PRICE, seats=seats)
    yield Shop(store, store_url, url, stage)


# What happens to an order: its customer, card and pack.
OK = ("buyer", "card_ok", "pack")
SOLD_OUT = ("buyer", "card_ok", "sold-out")
DECLINED = ("buyer", "card_declined", "pack")
LOST_ANSWER = ("buyer", "card_lost_answer", "pack")
FAILS_AT_RESERVE = ("fails-at-reserve-seats", "card_ok", "pack")
FAILS_AT_CHARGE = ("fails-at-charge", "card_ok", "pack")
FAILS_AT_CONFIRM = ("fails-at-confirm", "card_ok", "pack")
Case = tuple[str, str, str]


def every_death():
    """A failure at every step, with one SIGKILL at every moment on the way forward and back."""
    undone = {SOLD_OUT: 1, FAILS_AT_RESERVE: 1, DECLINED: 3, FAILS_AT_CHARGE: 3, FAILS_AT_CONFIRM: 3}
    matrix = []
    matrix += [(case, [(moment, step)]) for case in (OK,) for step in STEPS[1:] for moment in DO]
    matrix += [(LOST_ANSWER, [(moment, "charge")]) for moment in ("before intent", "after intent")]
    for case, steps in undone.items():
        matrix += [(case, [(moment, step)]) for step in STEPS[:steps] for moment in UNDO]
    # What a killed process left is resumed by one that is killed too, in the same step and on the way back.
    matrix += [(OK, [("after intent", "charge"), ("after effect", "charge"), ("after record", "charge")])]
    for moment in UNDO:
        matrix += [(FAILS_AT_CONFIRM, [("after effect", "charge"), (moment, "charge"), (moment, "reserve-seats")])]
    return matrix


@pytest.mark.slow
async def test_killed_at_any_moment_money_seats_and_order_agree_in_the_end(shop, scale, seed, figures):
    matrix = every_death()
    quick = scale(10, len(matrix))
    if quick < len(matrix):  # always with what the naive saga gets wrong, the rest drawn again each run
        must = [(OK, [("after effect", "charge")]), (FAILS_AT_CONFIRM, [("after undo effect", "charge")])]
        rest = [each for each in matrix if each not in must]
        matrix = must + random.Random(seed).sample(rest, quick - len(must))
    cases = [(await shop.place(case[0], method=case[1], pack=case[2]), case, deaths) for case, deaths in matrix]

    killed = 0
    for nth in range(3):
        wave = {order_id: deaths[nth] for order_id, _, deaths in cases if len(deaths) > nth}
        if not wave:
            break
        victims = [{"saga_id": o, "moment": m, "step": s, "signal": "KILL"} for o, (m, s) in wave.items()]
        for some in _dozens(victims):
            died = await shop.endings(running := shop.victims(some))
            assert died == {"signal 9": len(some)}, f"some never reached their moment: {some}\n{running}"
        killed += len(wave)
        await shop.end_leases()
    await shop.finish(processes=2)

    disagreements = await shop.disagreements()
    assert not disagreements
    assert await shop.seats_add_up()
    undos, twice = 0, 0
    for order_id, case, deaths in cases:
        saga, events = await shop.saga(order_id), await shop.events(order_id)
        expected = "completed" if case in (OK, LOST_ANSWER) else "compensated"
        assert saga.state == expected, (case, deaths, saga.error, events)
        done = [step for step, event in events if event in ("done", "found done")]
        undone = [step for step, event in events if event == "undone"]
        assert len(done) == len(set(done))
        assert undone == [step for step in reversed(STEPS) if step in undone], "undo was not in reverse order"
        assert set(done) - {"confirm"} <= set(undone) or expected == "completed"
        undos += len(undone)
        twice += len(undone) - len(set(undone))
    assert twice == 0, "an undo was recorded twice"

    naive_kills, forgotten = await _naive_kills(shop)
    figures(
        "saga",
        name=f"kills-{shop.kind}",
        orders=len(cases),
        kills=killed,
        inconsistent=len(disagreements),
        undone_steps=undos,
        undone_twice=twice,
        naive_kills=naive_kills,
        naive_inconsistent=len(forgotten),
    )


def _dozens(victims):
    """More at once only wait for each other on two cores, longer than a writer waits for SQLite."""
    return [victims[start : start + 12] for start in range(0, len(victims), 12)]


async def _naive_kills(shop):
    """The twin, killed at two of those moments: charged and forgotten, and seats reserved for nobody."""
    charged = await shop.place("buyer", naive=True)
    reserved = await shop.place("buyer", naive=True)
    program = shop.victims(
        [
            {"saga_id": charged, "moment": "after effect", "step": "charge", "signal": "KILL"},
            {"saga_id": reserved, "moment": "after effect", "step": "reserve-seats", "signal": "KILL"},
        ],
        mode="naive",
    )
    killed = await shop.endings(program)
    assert killed == {"signal 9": 2}
    await shop.finish()  # whoever comes next finds nothing to resume
    forgotten = await shop.disagreements()
    assert set(forgotten) == {charged, reserved}
    assert "processing, kept 2000" in forgotten[charged]
    assert "seats" in forgotten[reserved]
    return killed["signal 9"], forgotten


@pytest.mark.slow
async def test_charge_without_an_answer_is_completed_or_taken_back_never_forgotten(shop, figures):
    # The charge happens and the answer is lost: looked up under its key, then completed.
    lost = await shop.place("buyer", method="card_lost_answer")
    await shop.finish()
    assert ("charge", "found done") in await shop.events(lost)
    # The charge is given up and lands afterwards: voided under its key, so it is refused when it lands.
    late = await shop.place("fails-at-charge")
    await shop.fault("late", seconds=8.0)
    await shop.fault("unavailable", times=5)  # every later try, until no attempt is left
    await shop.finish(timeout=0.5)
    assert (await shop.saga(late)).state == "compensated"
    await until(lambda: shop.landed("late"), what="the late charge arrived at the provider")
    assert [call["status"] for call in (await shop.ledger())["calls"] if call["fault"] == "late"] == [409]
    # The naive saga: the error is caught, the charge is not among the steps done, so nobody refunds it.
    naive = await shop.place("buyer", method="card_lost_answer", naive=True)
    await shop.endings(shop.victims([{"saga_id": naive, "signal": None}], mode="naive"))

    disagreements = await shop.disagreements()
    assert set(disagreements) == {naive}
    assert "cancelled, kept 2000" in disagreements[naive]
    assert (await shop.saga(lost)).state == "completed"
    figures(
        "saga",
        name=f"lost-answer-{shop.kind}",
        orders=len(ours := {lost, late}),
        forgotten=len(ours & set(disagreements)),
        naive_orders=len(twins := {naive}),
        naive_forgotten=len(twins & set(disagreements)),
    )


async def test_outage_during_compensation_is_waited_out(shop, figures):
    await shop.fault("unavailable", "refund", times=4)
    order = await shop.place("fails-at-confirm")
    await shop.finish()
    events = await shop.events(order)
    assert events.count(("charge", "undo failed")) == 4
    assert (await shop.saga(order)).state == "compensated"

    before = len((await shop.ledger())["calls"])
    await shop.fault("unavailable", "refund", times=1)
    naive = await shop.place("fails-at-confirm", naive=True)
    await shop.endings(shop.victims([{"saga_id": naive, "signal": None}], mode="naive"))
    disagreements = await shop.disagreements()
    assert set(disagreements) == {naive}, "one 503 and the twin keeps the money and the seats"
    assert "seats" in disagreements[naive]
    refused = [call for call in (await shop.ledger())["calls"][before:] if call["fault"] == "unavailable"]
    figures(
        "saga",
        name=f"outage-in-undo-{shop.kind}",
        refused=events.count(("charge", "undo failed")),
        inconsistent=len(set(disagreements) - {naive}),
        naive_refused=len(refused),
        naive_inconsistent=len(disagreements),
    )


async def test_many_runners_share_the_sagas_and_never_one_of_them(shop, scale, figures):
    placed = [await shop.place("buyer") for _ in range(scale(12, 100))]
    await shop.finish(processes=3)
    starts, drivers = await shop.starts(placed)
    assert len(drivers) >= 2, "one process did it all, nothing was shown"
    assert set(starts.values()) == {1}, "a step was started twice"
    assert set(starts) == {(order, "charge") for order in placed}, "a DbStep has no start of its own"
    calls = await shop.charge_calls()
    assert calls == len(placed)
    assert not await shop.disagreements()

    # The same pollers without lease and fence: each takes whatever has not ended. The provider is slow, so a poller
    # that finds a charge another has just started looks it up too early, and makes it as well.
    twins = [await shop.place("buyer") for _ in range(scale(10, 100))]
    await shop.fault("late", times=len(twins), seconds=3.0)
    await shop.finish(processes=3, lease=False, fence=False)
    twin_starts, _ = await shop.starts(twins)
    assert sum(twin_starts.values()) > len(twin_starts), "nobody collided: then the lease was not needed here"
    figures(
        "saga",
        name=f"many-runners-{shop.kind}",
        sagas=len(placed),
        runners=len(drivers),
        steps_started_twice=sum(starts.values()) - len(starts),
        charge_calls=calls,
        sagas_without_lease=len(twins),
        steps_started_twice_without_lease=sum(twin_starts.values()) - len(twin_starts),
        charge_calls_without_lease=await shop.charge_calls() - calls,
    )


@pytest.mark.slow
async def test_frozen_holder_wakes_after_its_lease_and_its_write_is_refused(shop, figures):
    """Holders freeze around the charge, others take the saga from them and compensate, the holders wake."""
    held = {}
    for fence, moment in itertools.product((True, False), ("after intent", "after effect")):
        held[fence, moment] = await shop.place("fails-at-confirm")
    holders = {}
    for (fence, moment), order in held.items():
        victim = {"saga_id": order, "moment": moment, "step": "charge", "signal": "STOP"}
        # With a long deadline the call is still made after the pause, with a short one the lease ends soon.
        deadline = 4.0 if moment == "after effect" else 60.0
        holders[fence, moment] = shop.victims([victim], fence=fence, deadline=deadline, margin=0.3)
    frozen = [json.loads(await holder.line('"frozen"'))["frozen"] for holder in holders.values()]
    # For those frozen before their call somebody stops the order, so nobody else makes that call.
    for (_, moment), order in held.items():
        if moment == "after intent":
            await saga_repair.compensate(shop.store, order, by="operator", note="called", force=True)
    await shop.finish()  # of the others, once their leases have ended
    before = {order: await shop.events(order) for order in held.values()}
    for (_, moment), order in held.items():
        how = "taken over" if moment == "after effect" else "repair: compensate"
        assert (None, how) in before[order]
        assert before[order][-1] == (None, "compensated")

    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    for holder in holders.values():
        await holder.line("all ended", timeout=30)
    stale = {how: (await shop.events(order))[len(before[order]) :] for how, order in held.items()}
    with_fence = [event for (fence, _), events in stale.items() if fence for event in events]
    without = [event for (fence, _), events in stale.items() if not fence for event in events]
    assert with_fence == []
    for (fence, _), holder in holders.items():
        assert fence == any("is old" in line for line in holder.lines()), str(holder)
    assert without, "without the fence stale writes land: otherwise this test shows nothing"
    # They then sent the charge, which was void by then, and the provider refused it.
    late = [call["status"] for call in (await shop.ledger())["calls"] if call["operation"] == "charge"]
    assert late.count(409) == 2
    assert not set(await shop.disagreements()) & {order for (fence, _), order in held.items() if fence}
    figures(
        "saga",
        name=f"frozen-holder-{shop.kind}",
        frozen=sum(fence for fence, _ in held),
        stale_writes=len(with_fence),
        late_charges_refused=late.count(409),
        stale_writes_without_fence=len(without),
    )


async def test_repair_in_the_middle_of_a_call_is_refused_and_the_charge_is_never_orphaned(shop):
    """Another process is in the charge, which the provider takes seconds for."""
    order = await shop.place("buyer")
    await shop.fault("late", seconds=3.0)
    driver = shop.victims([{"saga_id": order, "signal": None}], timeout=20.0)

    async def called():
        return await shop.charge_calls() > 0

    await until(called, 30, "the other process to call the provider")
    for repair in (saga_repair.compensate, saga_repair.retry):
        with pytest.raises(saga_repair.StepRunning, match="is in step 'charge'"):
            await repair(shop.store, order, by="operator", note="customer called")
    assert await shop.endings(driver) == {"exit 0": 1}
    assert (await shop.saga(order)).state == "completed"
    assert await shop.charge_calls() == 1, "a second call ran beside the first"
    assert not await shop.disagreements()


async def test_five_deaths_in_a_step_consume_none_of_its_two_attempts(shop, figures):
    """Every process that gets to the charge is killed in it, then the provider fails once: one attempt is left.

    The twin counts a death as an attempt, like a counter raised when a step begins.
    """
    ours = {"charge": {"attempts": 2}}
    naive = {"charge": {"attempts": 2, "crashes": 2}}
    order, twin = await shop.place("buyer"), await shop.place("buyer")

    async def die_in_the_charge(order_id, limits):
        victim = {"saga_id": order_id, "moment": "after intent", "step": "charge", "signal": "KILL"}
        running = shop.victims([victim], limits=limits)
        assert await shop.endings(running) == {"signal 9": 1}, str(running)
        await shop.end_leases()

    deaths, twin_deaths = 5, 2
    for _ in range(deaths):
        await die_in_the_charge(order, ours)
    assert {step.name: (step.attempts, step.crashes) for step in (await shop.saga(order)).steps}["charge"] == (0, 4)
    await shop.fault("unavailable")
    await shop.endings(shop.victims([{"saga_id": order, "signal": None}], limits=ours))
    saga, events = await shop.saga(order), await shop.events(order)
    assert (saga.state, saga.steps[2].attempts) == ("completed", 2), events
    assert (events.count((None, "taken over")), events.count(("charge", "failed"))) == (deaths, 1)

    for _ in range(twin_deaths):
        await die_in_the_charge(twin, naive)
    await shop.endings(shop.victims([{"saga_id": twin, "signal": None}], limits=naive))
    lost = (await shop.saga(twin)).state
    assert lost == "compensated", "an order that nobody refused is lost"
    assert not await shop.disagreements()
    figures(
        "saga",
        name=f"deaths-{shop.kind}",
        kills=deaths,
        attempts=saga.steps[2].attempts,
        completed=int(saga.state == "completed"),
        naive_kills=twin_deaths,
        naive_completed=int(lost == "completed"),
    )


async def test_a_stuck_undo_beside_independent_ones_survives_kills(shop):
    """The refund is refused until it gives up; whoever releases the seats then is killed in it, or right after it."""
    limits = {"reserve-seats": {"independent": True}, "charge": {"undo_attempts": 2}}
    orders_of = {moment: await shop.place("fails-at-confirm") for moment in UNDO[1:]}
    twin = await shop.place("fails-at-confirm")
    await shop.fault("unavailable", "refund", times=2 * 4)
    victims = [
        {"saga_id": order, "moment": moment, "step": "reserve-seats", "signal": "KILL"}
        for moment, order in orders_of.items()
    ]
    running = shop.victims(victims, limits=limits)
    assert await shop.endings(running) == {"signal 9": len(victims)}, str(running)
    await shop.end_leases()
    usual = {"charge": {"undo_attempts": 2}}
    await shop.endings(shop.victims([{"saga_id": twin, "signal": None}], limits=usual))
    await shop.finish(limits=limits)

    for order in orders_of.values():
        saga, events = await shop.saga(order), await shop.events(order)
        assert saga.state == "needs_repair", events
        assert [step.state for step in saga.steps[:3]] == ["done", "undone", "stuck"]
        assert events.count(("reserve-seats", "undone")) == 1
    assert [step.state for step in (await shop.saga(twin)).steps[:3]] == ["done", "done", "stuck"]
    for order in (*orders_of.values(), twin):
        await saga_repair.retry(shop.store, order, by="operator", note="the provider is back")
    await shop.finish(limits=limits)
    assert {(await shop.saga(order)).state for order in (*orders_of.values(), twin)} == {"compensated"}
    assert await shop.seats_add_up()
    assert not await shop.disagreements()
