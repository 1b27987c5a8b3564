"""Schedules in Redis: applied by many, changed, renamed, forged, late and overlapping."""

import asyncio
import time
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import insert, select

from harness.pipelines import full_pipeline, full_producer
from harness.waiting import clock_at, until
from harness.workers import at_work, counts, queue_at
from studyhall.patterns.core.job import RetryPolicy, cancelled
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.schedule import Schedule, Schedules, ticking
from studyhall.patterns.schedule.history import missed, missed_slots, note_start, schedule_state
from studyhall.patterns.schedule.keeper import _spread
from studyhall.patterns.schedule.slots import Tick, tick_of
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, Payload


class Work(Payload):
    seconds: float = 0.0


class Service:
    """A producer, a signer, and what ran: schedule and slot of every start of a handler."""

    def __init__(self, url, store):
        self.url, self.store, self.ran = url, store, list[tuple[str, int]]()
        self.running = self.most = 0
        self.jobs = JobTypes()
        for name, queue in (("tick", "q"), ("tock", "other")):
            self.jobs.register(
                name=name, payload=Work, handler=self.handle, queue=queue, retry=RetryPolicy(base=0.1, cap=0.3)
            )
        self.signer = Signer(["0123456789abcdef"])
        self.producer = full_producer(self.jobs, url, signer=self.signer, timeout=10)

    async def handle(self, ctx, payload: Work):
        tick = tick_of(ctx.job_id, ctx.job.data)
        assert tick is not None
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(payload.seconds)
        self.running -= 1
        self.ran.append((tick.schedule, tick.slot))
        return {"slot": tick.slot}

    def schedules(self, *declared):
        return Schedules(self.jobs, declared, lease=1.0, sign=self.signer.sign)

    async def apply(self, *declared):
        return await self.schedules(*declared).apply(self.producer, self.store)

    def at_work(self, schedules, queue="q", **options):
        pipeline = full_pipeline(self.jobs, self.store, ticking(schedules, self.store), signer=self.signer)
        return at_work(queue, pipeline, url=self.url, **options)

    async def next_slot(self, schedule, queue="q"):
        score = await self.producer.redis.zscore(f"bull:{queue}:repeat", schedule)
        return None if score is None else int(score)

    async def since(self, schedule):
        job = await self.producer.queue("q").getJob(f"repeat:{schedule}:{await self.next_slot(schedule)}")
        tick = tick_of(job.id, job.data)
        assert tick is not None
        return tick.since

    async def state(self, schedules):
        return (await schedules.states(self.producer, self.store))[0]


@pytest.fixture
async def service(redis_url, tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'schedule.db'}")
    await create_all(store)
    made = Service(redis_url, store)
    yield made
    await made.producer.close()
    await close(store)


async def test_any_number_of_instances_apply_the_same_schedules_once(service):
    nightly = Schedule("nightly", "tick", cron="0 3 * * *")
    beat = Schedule("beat", "tick", every=60)
    await asyncio.gather(*(service.apply(nightly, beat) for _ in range(10)))
    before = await service.next_slot("nightly"), await service.next_slot("beat")
    again = await service.apply(nightly, beat)
    assert (again.written, again.removed) == ([], []), "nothing changed, nothing is written"
    assert (await service.next_slot("nightly"), await service.next_slot("beat")) == before
    assert await counts(service.producer.queue("q")) == {"delayed": 2}
    assert before[1] is not None
    assert before[1] % 60_000 == 0, "slots of an interval lie on a grid that all instances share"


async def test_what_is_no_longer_declared_goes_and_strangers_stay(service):
    stranger = {"pattern": "0 0 * * *"}
    await service.producer.queue("q").upsertJobScheduler("stranger", stranger, "x", {}, {})
    await service.apply(Schedule("a", "tick", every=60), Schedule("b", "tick", every=60))
    done = await service.apply(Schedule("a", "tock", every=60))  # b is gone, a moved to another queue
    assert sorted(done.removed) == ["a", "b"]
    assert await service.next_slot("a") is None
    assert await service.next_slot("a", "other") is not None
    assert await service.next_slot("stranger") is not None
    assert await counts(service.producer.queue("q")) == {"delayed": 1}


async def test_a_changed_schedule_replaces_its_next_tick(service):
    await service.apply(Schedule("a", "tick", cron="0 3 * * *", payload={"seconds": 1}))
    slot = await service.next_slot("a")
    await service.apply(Schedule("a", "tick", cron="0 3 * * *", payload={"seconds": 2}))
    job = await service.producer.queue("q").getJob(f"repeat:a:{slot}")
    assert job is not None
    assert job.data["payload"] == {"seconds": 2}
    await service.apply(Schedule("a", "tick", cron="0 4 * * *", payload={"seconds": 2}))
    assert await service.next_slot("a") != slot
    assert await counts(service.producer.queue("q")) == {"delayed": 1}


async def test_a_renamed_schedule_keeps_its_history_and_repeats_no_slot(service):
    old = service.schedules(Schedule("old", "tick", every=0.5))
    await old.apply(service.producer, service.store)
    async with service.at_work(old):
        await until(lambda: len(service.ran) >= 2, what="two ticks")
    before = await service.state(old)
    new = service.schedules(Schedule("new", "tick", every=0.5, was=["old"]))
    await new.apply(service.producer, service.store)
    assert await service.next_slot("old") is None
    assert (await service.next_slot("new") or 0) > before.last_slot
    async with service.at_work(new):
        await until(lambda: [name for name, _ in service.ran].count("new") >= 1, what="a tick under the new name")
    slots = [slot for _, slot in service.ran]
    assert len(slots) == len(set(slots))
    assert (await service.state(new)).ticks > before.ticks


async def test_ticks_pass_the_signed_pipeline_and_forged_ones_do_not(service):
    declared = service.schedules(Schedule("a", "tick", every=3600))
    await declared.apply(service.producer, service.store)
    queue = service.producer.queue("q")
    slot = await service.next_slot("a") or 0
    template = (await queue.getJob(f"repeat:a:{slot}")).data
    past = slot - 3_600_000
    forged = {
        f"repeat:a:{past - 1}": template,  # not a slot
        f"repeat:b:{past}": template,  # another schedule
        "my-own": template,
        f"repeat:a:{past - 3_600_000}": {**template, "payload": {"seconds": 9}},
        f"repeat:a:{past - 7_200_000}": {**template, "schedule": {"id": "a", "every": 1}},
        f"repeat:a:{past - 10_800_000}": {k: v for k, v in template.items() if k != "sig"},
        f"repeat:a:{past - 14_400_000}": {k: v for k, v in template.items() if k != "schedule"},
    }
    for job_id, data in forged.items():
        await queue.add("tick", data, {"jobId": job_id})
    await queue.add("tick", template, {"jobId": f"repeat:a:{past}"})  # a genuine slot that was missed
    async with service.at_work(declared):
        await until(lambda: service.ran, what="the genuine tick")

        async def settled():
            return await queue.getFailedCount() == len(forged)

        await until(settled, what="every forged tick is refused")
    assert service.ran == [("a", past)]
    reasons = {job.id: job.failedReason for job in await queue.getFailed()}
    assert all("ForgedJob" in reason for reason in reasons.values()), reasons


async def test_the_slot_is_the_key_a_tick_delivered_again_takes_no_effect(service):
    declared = service.schedules(Schedule("a", "tick", every=0.5))
    await declared.apply(service.producer, service.store)
    queue = service.producer.queue("q")
    async with service.at_work(declared):
        await until(lambda: service.ran, what="a tick")
        _, slot = service.ran[0]
        await queue.removeJobScheduler("a")
        job = await queue.getJob(f"repeat:a:{slot}")
        assert job is not None
        data = job.data
        await until(queue.getCompletedCount, what="it is completed")
        await queue.remove(f"repeat:a:{slot}")
        await queue.add("tick", data, {"jobId": f"repeat:a:{slot}"})
        await until(queue.getCompletedCount, what="it is completed again")
    assert [run for run in service.ran if run[1] == slot] == [("a", slot)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "queue"])
async def test_a_tick_whose_predecessor_still_runs_is_skipped_or_waits(service, policy):
    schedule = Schedule(f"o-{policy}", "tick", every=0.3, payload={"seconds": 0.8}, overlap=policy)
    declared = service.schedules(schedule)
    await declared.apply(service.producer, service.store)
    queue = service.producer.queue("q")
    async with service.at_work(declared):
        await until(lambda: len(service.ran) >= 2, 20, "two long ticks")
        await queue.removeJobScheduler(schedule.id)

        async def idle():
            left = await counts(queue)
            return not any(left.get(name) for name in ("active", "delayed", "waiting", "prioritized"))

        await until(idle, 30, "every tick under way ends")
    state = await service.state(declared)
    skipped = [job for job in await queue.getCompleted() if cancelled(job.returnvalue)]
    assert service.most == 1, "two ticks ran at once"
    if policy == "skip":
        assert state.skipped > 0
        assert "still runs" in str(skipped[0].returnvalue)
    else:
        assert (state.skipped, len(service.ran)) == (0, state.ticks), "every tick had its turn"


@pytest.mark.parametrize("policy", ["run", "skip"])
async def test_a_late_tick_runs_once_for_all_that_were_missed_or_not_at_all(service, policy):
    schedule = Schedule(f"late-{policy}", "tick", every=0.3, when_late=policy)
    declared = service.schedules(schedule)
    await declared.apply(service.producer, service.store)
    pending = await service.next_slot(schedule.id)
    await asyncio.sleep(1.2)  # no worker runs: three more slots pass
    assert (await service.apply(schedule)).unchanged == [schedule.id], "a restart does not drop the tick that is late"
    # One at a time: on a slow machine the next tick would be noted before the late one, the first of all.
    async with service.at_work(declared, concurrency=1):

        async def second():
            return bool((await service.state(declared)).ticks >= 2)

        await until(second, what="the tick after the late one")
    state = await service.state(declared)
    assert state.missed >= 2
    assert ((schedule.id, pending) in service.ran) == (policy == "run")


async def test_a_tick_that_its_successor_overtook_counts_as_run_and_not_as_missed_too(service):
    """Its worker hung, or was killed, after the next tick was planned and before this one was noted."""
    schedules = service.schedules(Schedule("beat", "tick", every=0.5, overlap="queue"))
    overtaken = []
    go_on = asyncio.Event()

    async def hangs_once(run, call_next):
        if not overtaken and service.ran:
            tick = tick_of(run.job_id, run.job.data)
            assert tick is not None
            overtaken.append(tick.slot)
            await go_on.wait()
        return await call_next(run)

    await schedules.apply(service.producer, service.store)
    pipeline = full_pipeline(
        service.jobs, service.store, hangs_once, ticking(schedules, service.store), signer=service.signer
    )
    async with at_work("q", pipeline, url=service.url):
        await until(lambda: len(service.ran) >= 3, what="ticks before and after the one that hangs")
        reported = (await service.state(schedules)).missed
        go_on.set()
        await until(lambda: ("beat", overtaken[0]) in service.ran, what="the tick that was overtaken")
        await service.producer.queue("q").removeJobScheduler("beat")
        await until(lambda: not service.running, what="the last tick")
    state = await service.state(schedules)
    assert reported == 1, "as long as it had not run, it was missed"
    assert (state.missed, state.ticks) == (0, len(service.ran))
    assert len({slot for _, slot in service.ran}) == len(service.ran)


async def test_schedules_come_back_after_redis_lost_them_and_never_touch_those_of_a_newer_version(service):
    declared = service.schedules(Schedule("a", "tick", cron="0 3 * * *"))
    await declared.apply(service.producer, service.store)
    assert (await declared.heal(service.producer, service.store)).written == []
    await service.producer.redis.flushall()
    assert (await declared.heal(service.producer, service.store)).written == ["a"]
    # Its next job is lost alone: BullMQ by itself would never fire again.
    slot = await service.next_slot("a")
    await service.producer.redis.zrem("bull:q:delayed", f"repeat:a:{slot}")
    await service.producer.redis.delete(f"bull:q:repeat:a:{slot}")
    assert (await declared.heal(service.producer, service.store)).written == ["a"]
    assert await counts(service.producer.queue("q")) == {"delayed": 1}
    # A newer instance changed it: the older one leaves it alone.
    await service.apply(Schedule("a", "tick", cron="0 5 * * *"))
    newer = await service.next_slot("a")
    assert (await declared.heal(service.producer, service.store)).written == []
    assert await service.next_slot("a") == newer


@pytest.mark.parametrize("when", [{"every": 1}, {"cron": "* * * * * *"}])
async def test_a_slot_noted_by_a_clock_that_was_ahead_silences_nobody(service, when):
    """As left by a worker an hour ahead that judged slots by its own clock: last and next slot in the future."""
    schedule = Schedule("a", "tick", **when)
    declared = service.schedules(schedule)
    await declared.apply(service.producer, service.store)
    future = schedule.cadence.next_after((time.time() + 3600) * 1000)
    row = {"id": "a", "last_slot": future, "ticks": 5, "missed": 0, "skipped": 0}
    async with begin(service.store) as tx:
        await tx.execute(insert(schedule_state).values(row))
    queue = service.producer.queue("q")
    slot = await service.next_slot("a")
    await queue.removeJobScheduler("a")
    template = {"pattern": "0 0 1 1 *"} if "cron" in when else {"every": 1000, "startDate": future}
    await queue.upsertJobScheduler("a", template, "tick", {}, {})
    assert (await service.next_slot("a") or 0) >= future
    assert (await declared.heal(service.producer, service.store)).written == ["a"]
    async with service.at_work(declared):
        await until(lambda: len(service.ran) >= 3, 20, "ticks")
    state = await service.state(declared)
    assert slot is not None
    assert all(slot <= ran < future for _, ran in service.ran)
    assert state.ticks >= 5 + 3
    assert state.last_slot < future


async def test_a_tick_under_way_when_the_next_one_starts_does_not_set_the_count_back(service):
    """It had looked at the clock before the next slot came: that slot then counted as one of the future, the count
    went back behind it, and the tick after it reported it as missed although it had run."""
    first, slow, later, last = (Tick("a", slot, {"every": 0.3}) for slot in (600, 900, 1200, 1500))
    await note_start(service.store, first, clock_at(600))
    await note_start(service.store, later, clock_at(1200))
    await note_start(service.store, slow, clock_at(1210))
    await note_start(service.store, last, clock_at(1500))
    state = await service.state(service.schedules(Schedule("a", "tick", every=0.3)))
    assert (state.last_slot, state.ticks, state.missed) == (1500, 4, 0)
    assert await missed(service.store, "a") == []


async def test_ten_days_without_a_worker_are_counted_to_the_last_tick_while_the_loop_goes_on(service):
    """14,399 were reported as 10,000, and counting them held up the event loop for 3.4 s in a transaction."""
    schedule = Schedule("a", "tick", cron="* * * * *")
    missed, minute = 14_399, 60_000
    slot = int(time.time() * 1000) // minute * minute
    last = slot - (missed + 1) * minute
    row = {"id": "a", "last_slot": last, "ticks": 1, "missed": 0, "skipped": 0}
    async with begin(service.store) as tx:
        await tx.execute(insert(schedule_state).values(row))
    tick = Tick("a", slot, {"cron": schedule.cron})
    began = time.perf_counter()
    schedule.cadence.missed(last, slot, 1)
    counting = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(100):
        schedule.cadence.next_after(slot)
    asking = (time.perf_counter() - began) / 100
    await note_start(service.store, tick, clock_at(slot))
    assert (await service.state(service.schedules(schedule))).missed == missed
    async with read(service.store) as connection:
        known = [row.slot for row in await connection.execute(select(missed_slots).order_by("slot"))]
    assert known == list(range(slot - 1000 * minute, slot, minute)), "the latest are known by name"
    assert counting < 0.02 * missed * asking, "as slow as asking for each slot"


async def test_a_changed_definition_counts_from_the_change(service):
    """A nightly job now runs every second: the seconds since last night were never its slots."""
    nightly = Schedule("a", "tick", cron="0 3 * * *")
    await service.apply(nightly)
    last = nightly.cadence.next_after((time.time() - 86_400) * 1000)
    row = {"id": "a", "last_slot": last, "ticks": 1, "missed": 0, "skipped": 0}
    async with begin(service.store) as tx:
        await tx.execute(insert(schedule_state).values(row))
    changed = service.schedules(Schedule("a", "tick", every=1))
    began = time.monotonic()
    await changed.apply(service.producer, service.store)
    async with service.at_work(changed):
        await until(lambda: len(service.ran) >= 2, 20, "two ticks")
    state = await service.state(changed)
    assert state.missed <= time.monotonic() - began, "slots from before the change are reported as missed"
    # Written again for another reason it still counts from that change.
    since = await service.since("a")
    await service.apply(Schedule("a", "tick", every=1, payload={"seconds": 0.1}))
    assert await service.since("a") == since > last
    await service.producer.redis.flushall()
    await changed.heal(service.producer, service.store)
    assert await service.since("a") == 0, "after a loss of data the outage counts: nothing is known of a change"


async def test_a_slot_that_bullmq_computed_wrong_at_the_end_of_summer_time_is_put_right(service, monkeypatch):
    schedule = Schedule("a", "tick", cron="0 3 * * *", tz="Europe/Berlin")
    declared = service.schedules(schedule)
    await declared.apply(service.producer, service.store)
    eve = int(datetime(2026, 10, 24, 12, tzinfo=ZoneInfo("Europe/Berlin")).timestamp() * 1000)

    async def on_that_eve(_redis):
        return eve

    monkeypatch.setattr("studyhall.patterns.schedule.keeper.server_millis", on_that_eve)
    monkeypatch.setattr("bullmq.job_scheduler.time.time", lambda: eve / 1000)
    queue = service.producer.queue("q")
    await queue.removeJobScheduler("a")
    await queue.upsertJobScheduler("a", {"pattern": schedule.cron, "tz": schedule.tz}, "tick", {}, {})
    wrong = await service.next_slot("a") or 0
    assert (await declared.heal(service.producer, service.store)).written == ["a"]
    assert await service.next_slot("a") == wrong - 3_600_000


async def test_jitter_spreads_a_tick_within_its_bounds_and_costs_no_attempt(service):
    declared = service.schedules(Schedule("a", "tick", every=2, jitter=1.9))
    await declared.apply(service.producer, service.store)
    async with service.at_work(declared):
        await until(lambda: service.ran, 20, "a tick")
        late = time.time() - service.ran[0][1] / 1000
        await until(service.producer.queue("q").getCompletedCount, what="it is completed")
    job = await service.producer.queue("q").getJob(f"repeat:a:{service.ran[0][1]}")
    assert job is not None
    assert job.attemptsMade == 1
    spread = _spread(declared["a"], service.ran[0][1]) / 1000
    assert 0 <= spread < 1.9
    assert late >= spread - 0.1, "it did not wait for its share of the jitter"


async def test_repeat_in_the_options_of_a_job_is_silently_ignored(redis_url, figures):
    """The naive twin: what Node's older documentation says, accepted by bullmq for Python and never repeated."""
    ran = []

    async def processor(job, token):
        ran.append(job.id)

    async with queue_at(redis_url, "naive") as queue, at_work("naive", processor, url=redis_url):
        await queue.add("tick", {}, {"repeat": {"every": 100}})
        began = time.monotonic()
        await until(lambda: ran, what="the first run")
        await asyncio.sleep(1.0)
        expected = int((time.monotonic() - began) / 0.1)
    assert len(ran) == 1
    figures("schedule", name="repeat-option", expected_runs=expected, naive_runs=len(ran))
