"""The saga on both databases, one runner in this process. Kills and freezes: faults/test_saga_faults.py."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import insert, select, text

from harness.waiting import until
from harness.workers import at_work, queue_at, until_counts
from studyhall.maintenance import clean_up
from studyhall.patterns.core import open_store as open_store_module
from studyhall.patterns.core.errors import Permanent, RateLimited, RetryLater, Transient
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, is_postgres
from studyhall.patterns.outside_call import NotMade
from studyhall.patterns.saga import DbStep, Saga, SagaRunner, SagaStep, StepContext
from studyhall.patterns.saga import repair as saga_repair
from studyhall.patterns.saga import store as saga_store

FAST = RetryPolicy(base=0.001, cap=0.005, attempts=4, max_age=30)
Answer = dict[str, Any] | Exception | Callable[[StepContext], Awaitable[Any]] | None


class World:
    """Outside systems: what they were asked, and what they answer (the last answer is repeated)."""

    def __init__(self, **answers):
        self.answers = answers
        self.calls: list[str] = []
        self.contexts: dict[str, list[StepContext]] = {}

    def action(self, name):
        async def act(ctx):
            self.calls.append(name)
            self.contexts.setdefault(name, []).append(ctx)
            answers = self.answers.get(name, [{}])
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, Exception):
                raise answer
            return await answer(ctx) if callable(answer) else answer

        return act

    def step(self, name, *, resolve=False, **limits):
        asks = self.action(f"find {name}") if resolve else None
        limits = {"retry": FAST, "undo_retry": FAST, **limits}
        return SagaStep(name, self.action(name), self.action(f"undo {name}"), asks, **limits)


async def started(store, saga, saga_id="s1", **data):
    runner = SagaRunner(store, saga)
    async with begin(store) as tx:
        await runner.start(tx, saga.name, saga_id, data)
    return runner


async def settled(runner, saga_id="s1"):
    """Drive until it ended or waits for a human."""

    async def ended():
        saga = await runner.run(saga_id)
        return saga if saga.due_at is None else None

    row = await until(ended, what=f"saga {saga_id} came to an end")
    assert row is not None
    return row


async def events(store, saga_id="s1"):
    rows = await saga_store.history(store, saga_id)
    return [f"{row.step} {row.event}" if row.step else row.event for row in rows]


async def test_all_steps_run_in_order_and_see_earlier_results(store):
    world = World(a=[{"id": 1}], b=[{"id": 2}])
    runner = await started(store, Saga("trip", [world.step("a"), world.step("b")]), colour="red")
    assert (await settled(runner)).state == "completed"
    assert world.calls == ["a", "b"]
    assert world.contexts["b"][0].results == {"a": {"id": 1}}
    assert world.contexts["b"][0].data == {"colour": "red"}
    assert await events(store) == ["created", "a started", "a done", "b started", "b done", "completed"]


async def test_a_task_group_that_fails_in_a_step_is_a_failed_attempt(store):
    """Python before 3.13 leaves the task marked as cancelled: the runner raised it and left the saga alone."""

    async def breaks():
        raise ValueError

    async def grouped(ctx):
        async with asyncio.TaskGroup() as group:
            group.create_task(breaks())

    world = World(a=[grouped, {}])
    runner = await started(store, Saga("trip", [world.step("a")]))
    assert (await settled(runner)).state == "completed"
    assert world.calls == ["a", "a"]


async def test_permanent_failure_undoes_the_started_step_too_in_reverse(store):
    world = World(a=[{"id": 1}], c=[Permanent("no")])
    steps = [world.step("a"), world.step("b"), world.step("c"), world.step("d")]
    runner = await started(store, Saga("trip", steps))
    saga = await settled(runner)
    assert saga.state == "compensated"
    assert world.calls == ["a", "b", "c", "undo c", "undo b", "undo a"]
    assert world.contexts["undo c"][0].result is None, "nobody knows whether c took effect"
    assert world.contexts["undo a"][0].result == {"id": 1}
    assert saga.error == "c: Permanent: no"


async def test_same_id_starts_once_and_other_data_is_refused(store):
    runner = SagaRunner(store, Saga("trip", [World().step("a")]))

    async def start():
        async with begin(store) as tx:
            return await runner.start(tx, "trip", "s1", {"n": 1})

    assert sorted(await asyncio.gather(*(start() for _ in range(5)))) == [False] * 4 + [True]
    with pytest.raises(saga_store.SagaConflict, match="one id per business request"):
        async with begin(store) as tx:
            await runner.start(tx, "trip", "s1", {"n": 2})
    with pytest.raises(ValueError, match="known: trip"):
        async with begin(store) as tx:
            await runner.start(tx, "tripp", "s2", {})


async def test_transient_errors_are_retried_under_one_key_then_compensated(store):
    world = World(a=[Transient("x"), {"id": 1}], b=[Transient("503")])
    runner = await started(store, Saga("trip", [world.step("a"), world.step("b")]))
    saga = await settled(runner)
    assert saga.state == "compensated"
    assert "attempt 4 of 4" in str(saga.error)
    assert world.calls == ["a", "a", "b", "b", "b", "b", "undo b", "undo a"]
    keys = {ctx.key for ctx in world.contexts["b"]}
    assert len(keys) == 1
    assert world.contexts["undo b"][0].key in keys
    assert world.contexts["undo b"][0].undo_key not in keys
    assert keys.isdisjoint({ctx.key for ctx in world.contexts["a"]})


async def test_rate_limit_waits_as_told_and_consumes_no_attempt(store):
    busy = [RateLimited(retry_after=0.01) for _ in range(2)]
    world = World(a=[*busy, {"id": 1}])
    runner = await started(store, Saga("trip", [world.step("a", retry=RetryPolicy(attempts=1, max_age=60))]))
    began = time.monotonic()
    async with asyncio.timeout(60):
        while (saga := await runner.run("s1")).due_at is not None:
            await asyncio.sleep(max(0.0, saga.due_at - time.time()))
    assert saga.state == "completed"
    assert world.calls.count("a") == 3
    assert saga.steps[0].attempts == 1
    assert time.monotonic() - began >= 2 * 0.01


async def test_hung_step_is_cut_off_and_its_outcome_looked_up(store):
    cancelled = asyncio.Event()

    async def hang(_):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    world = World(a=[hang], **{"find a": [{"id": 7}]})
    runner = await started(store, Saga("trip", [world.step("a", resolve=True, deadline=0.05)]))
    saga = await settled(runner)
    assert cancelled.is_set()
    assert saga.state == "completed"
    assert world.calls == ["a", "find a"], "found done, so it is not done again"
    assert saga.steps[0].result == {"id": 7}
    assert "a found done" in await events(store)


async def test_db_step_is_done_with_its_record_or_not_at_all(store):
    seen = []

    async def note(ctx, tx):
        await saga_store.record(tx, "effects", "test", f"{ctx.step} {ctx.attempt}")
        if ctx.attempt == 1:
            raise Transient("after the write")
        return {"n": ctx.attempt}

    async def unnote(ctx, tx):
        seen.append(f"undo {ctx.step} {ctx.result}")

    async def never(ctx, tx):
        raise Permanent("no")

    steps = [
        DbStep("placed", undo=unnote),
        DbStep("one", note, unnote, retry=FAST),
        DbStep("two", never, unnote, retry=FAST),
    ]
    runner = await started(store, Saga("trip", steps))
    assert (await settled(runner)).state == "compensated"
    effects = [row.event for row in await saga_store.history(store, "effects")]
    assert effects == ["one 2"], "the failed try was rolled back"
    assert seen == ["undo one {'n': 2}", "undo placed {}"], "two never happened, so there is nothing to undo"
    assert "two undone" not in await events(store)


async def test_a_transaction_nested_in_a_db_step_is_named_at_once(store):
    """On SQLite it waited for its own step, and failed as slow work."""

    async def nested(ctx, tx):
        async with begin(store):
            pass

    runner = await started(store, Saga("trip", [DbStep("a", nested)]))
    async with asyncio.timeout(5):
        saga = await settled(runner)
    assert is_postgres(store) or "pass the outer one's connection on" in saga.error


async def test_undo_that_gives_up_waits_for_a_human_who_marks_it_undone(store):
    world = World(b=[Permanent("no")], **{"undo b": [Transient("503")]})
    runner = await started(store, Saga("trip", [world.step("a"), world.step("b")]))
    saga = await settled(runner)
    assert saga.state == "needs_repair"
    assert world.calls.count("undo b") == FAST.attempts
    assert "undo a" not in world.calls, "strict order: a is not undone before b"
    assert [row.id for row in await saga_store.list_sagas(store, state="needs_repair")] == ["s1"]
    assert await runner.resume_due() == 0, "nobody touches it until it is repaired"

    await saga_repair.mark(store, "s1", "b", "undone", by="ann", note="refunded in the bank's portal")
    assert (await settled(runner)).state == "compensated"
    assert world.calls[-1] == "undo a"
    rows = [row for row in await saga_store.history(store, "s1") if row.actor == "ann"]
    assert [(row.step, row.event, row.detail) for row in rows] == [
        ("b", "repair: undone by hand", "refunded in the bank's portal")
    ]


async def test_repair_retry_restores_the_attempts(store):
    world = World(b=[Permanent("no")], **{"undo b": [Permanent("closed"), {}]})
    runner = await started(store, Saga("trip", [world.step("a"), world.step("b")]))
    assert (await settled(runner)).state == "needs_repair"
    await saga_repair.retry(store, "s1", by="ann", note="account is open again")
    assert (await settled(runner)).state == "compensated"
    assert world.calls == ["a", "b", "undo b", "undo b", "undo a"]


async def test_repair_can_stop_a_saga_that_goes_forward_and_mark_a_step_done(store):
    slow = RetryPolicy(base=300, cap=300, attempts=5)
    world = World(b=[Transient("down for days")])
    saga = Saga("trip", [world.step("a"), world.step("b", retry=slow), world.step("c")])
    runner = await started(store, saga)
    await started(store, saga, "s2")
    for saga_id in ("s1", "s2"):
        assert (await runner.run(saga_id)).state == "running"
    await saga_repair.compensate(store, "s1", by="ann", note="customer gave up")
    assert (await settled(runner, "s1")).state == "compensated"
    assert world.calls[-2:] == ["undo b", "undo a"]
    await saga_repair.mark(store, "s2", "b", "done", by="ann", note="by phone", result={"id": 9})
    assert (await settled(runner, "s2")).state == "completed"
    assert world.contexts["c"][0].results["b"] == {"id": 9}


async def test_repairs_that_make_no_sense_are_refused_with_what_would(store):
    world = World(b=[Permanent("no")], **{"undo b": [Permanent("closed")]})
    runner = await started(store, Saga("trip", [world.step("a"), world.step("b")]))
    await settled(runner)
    stuck = await saga_store.load(store, "s1")
    with pytest.raises(saga_repair.CannotRepair, match="mark the step undone"):
        await saga_repair.mark(store, "s1", "b", "done", by="ann", note="?")
    with pytest.raises(saga_repair.CannotRepair, match="its steps: a, b"):
        await saga_repair.mark(store, "s1", "x", "undone", by="ann", note="?")
    with pytest.raises(saga_repair.CannotRepair, match="note"):
        await saga_repair.retry(store, "s1", by="ann", note=" ")
    with pytest.raises(saga_store.UnknownSaga):
        await saga_repair.retry(store, "nope", by="ann", note="?")
    assert await saga_store.load(store, "s1") == stuck, "a refused repair changes nothing"
    await saga_repair.mark(store, "s1", "b", "undone", by="ann", note="done")
    await settled(runner)
    with pytest.raises(saga_repair.CannotRepair, match="ended"):
        await saga_repair.compensate(store, "s1", by="ann", note="again")


async def test_forced_repair_takes_the_saga_away_from_a_running_process(store):
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_):
        reached.set()
        await go_on.wait()
        return {"id": "late"}

    world = World(a=[wait])
    runner = await started(store, Saga("trip", [world.step("a")]))
    driving = asyncio.create_task(runner.run("s1"))
    await asyncio.wait_for(reached.wait(), 10)
    before = await saga_store.load(store, "s1")
    with pytest.raises(saga_repair.StepRunning, match="is in step 'a'"):
        await saga_repair.compensate(store, "s1", by="ann", note="stop")
    with pytest.raises(saga_repair.StepRunning, match="force"):
        await saga_repair.retry(store, "s1", by="ann", note="again")
    assert await saga_store.load(store, "s1") == before, "a refused repair changes nothing"
    await saga_repair.compensate(store, "s1", by="ann", note="stop", force=True)
    go_on.set()
    await driving
    assert (await saga_store.load(store, "s1")).steps[0].result is None, "its write came too late"
    assert (await settled(runner)).state == "compensated"
    assert world.calls == ["a", "undo a"]


async def test_step_that_kills_its_process_again_and_again_is_given_up(store):
    world = World()
    runner = await started(store, Saga("trip", [world.step("a"), world.step("b", crashes=4)]))
    await runner.run("s1")
    async with begin(store) as tx:  # as four processes leave it that died in b
        await tx.execute(text("UPDATE saga SET state = 'running', due_at = 0, owner = 'the fourth'"))
        await tx.execute(text("UPDATE saga_step SET state = 'started', crashes = 3, result = NULL WHERE name = 'b'"))
    world.calls.clear()
    saga = await settled(runner)
    assert saga.state == "compensated"
    assert "died 4 times" in str(saga.error)
    assert world.calls == ["undo b", "undo a"]


async def test_changed_definition_is_not_guessed_at(store):
    await started(store, Saga("trip", [World().step("a"), World().step("b")]))
    changed = World()
    runner = SagaRunner(store, Saga("trip", [changed.step("b"), changed.step("a")]))
    saga = await runner.run("s1")
    assert saga.state == "needs_repair"
    assert "rename a changed saga" in str(saga.error)
    assert changed.calls == []


async def test_runner_leaves_sagas_it_does_not_know_to_others(store):
    first = await started(store, Saga("trip", [World().step("a")]))
    stranger = SagaRunner(store, Saga("cruise", [World().step("a")]))
    assert await stranger.resume_due() == 0
    assert (await stranger.run("s1")).state == "running"
    assert (await settled(first)).state == "completed"


async def test_stop_finishes_the_step_and_releases_the_saga_at_once(store):
    world = World()
    saga = Saga("trip", [world.step("a"), world.step("b")])
    runner = await started(store, saga)

    async def stopping(_):
        runner.stop()
        return {"id": 1}

    world.answers["a"] = [stopping]
    await asyncio.wait_for(runner.run_forever(poll=0.01), 10)
    assert world.calls == ["a"]
    handed = await saga_store.load(store, "s1")
    assert handed.owner is None
    assert handed.steps[0].state == "done"
    assert (await settled(SagaRunner(store, saga))).state == "completed"
    assert world.calls == ["a", "b"]


async def test_hanging_saga_delays_only_itself(store):
    released = asyncio.Event()

    async def hang(ctx):
        if ctx.saga_id == "s1":
            await released.wait()

    world = World(a=[hang])
    saga = Saga("trip", [world.step("a", deadline=60)])
    runner = await started(store, saga)
    running = asyncio.create_task(runner.run_forever(poll=0.05, limit=2))
    await until(lambda: world.calls, what="the first saga hangs")
    for number in range(2, 6):
        await started(store, saga, f"s{number}")

    async def completed():
        return len(await saga_store.list_sagas(store, state="completed")) == 4

    await until(completed, what="the others are through")
    assert (await saga_store.load(store, "s1")).state == "running"
    released.set()
    runner.stop()
    await asyncio.wait_for(running, 10)
    assert (await saga_store.load(store, "s1")).steps[0].state == "done"


async def test_purge_forgets_old_ended_sagas_and_nothing_else(store):
    world = World(b=[Permanent("no")], **{"undo b": [Permanent("closed")]})
    runner = await started(store, Saga("trip", [world.step("a")]), "ended")
    assert (await settled(runner, "ended")).state == "completed"
    stuck = Saga("stuck", [world.step("a"), world.step("b")])
    assert (await settled(await started(store, stuck, "stuck"), "stuck")).state == "needs_repair"
    assert await saga_store.purge(store, older_than=60) == 0
    assert await saga_store.purge(store, older_than=-60) == 1
    assert [row.id for row in await saga_store.list_sagas(store)] == ["stuck"]
    assert await saga_store.history(store, "ended") == []
    assert await saga_store.history(store, "stuck")


async def test_daily_clean_up_forgets_old_ended_sagas(store, tmp_path):
    ended = {"name": "trip", "state": "completed", "data": {}, "created_at": 0.0}
    rows = [{"id": f"old-{n}", **ended, "updated_at": 0.0} for n in range(1_200)]
    async with begin(store) as tx:
        await tx.execute(insert(saga_store.sagas), [*rows, {"id": "young", **ended, "updated_at": time.time()}])
    assert (await clean_up(store, tmp_path)).numbers()["sagas"] == 1_200
    assert [row.id for row in await saga_store.list_sagas(store)] == ["young"]


async def test_timeline_goes_on_after_two_billion_entries(store):
    last = 2**31 - 1
    async with begin(store) as tx:
        if is_postgres(store):
            await tx.execute(text(f"SELECT setval(pg_get_serial_sequence('saga_history', 'id'), {last})"))
        else:
            full = {"id": last, "saga_id": "x", "at": 0.0, "actor": "x", "event": "x"}
            await tx.execute(insert(saga_store.saga_history).values(full))
        await saga_store.record(tx, "s1", "test", "one more")
    assert await events(store) == ["one more"]


async def test_timeline_names_who_when_and_why_without_secrets(store):
    world = World(a=[Permanent("card 4242 4242 4242 4242 of ann@example.com declined, Bearer abc.def")])
    runner = await started(store, Saga("trip", [world.step("a")]))
    saga = await settled(runner)
    rows = await saga_store.history(store, "s1")
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert {row.actor for row in rows} == {"caller", runner.owner}
    details = " ".join(str(row.detail) for row in rows) + str(saga.error)
    assert "declined" in details
    for secret in ("4242 4242", "ann@example.com", "abc.def"):
        assert secret not in details


async def test_looking_for_due_sagas_does_not_read_the_ended_ones(store):
    ended = {"name": "trip", "state": "completed", "data": {}, "created_at": 0.0, "updated_at": 0.0}
    async with begin(store) as tx:
        await tx.execute(insert(saga_store.sagas), [{"id": f"old-{n}", **ended} for n in range(5_000)])
    due = select(saga_store.sagas.c.id).where(saga_store.sagas.c.due_at <= time.time())
    due = due.order_by(saga_store.sagas.c.due_at).limit(10)
    async with begin(store) as tx:
        await tx.execute(text("ANALYZE"))
        sql = str(due.compile(store.sync_engine, compile_kwargs={"literal_binds": True}))
        explain = "EXPLAIN" if is_postgres(store) else "EXPLAIN QUERY PLAN"
        plan = "\n".join(str(row) for row in (await tx.execute(text(f"{explain} {sql}"))).all())
    assert "saga_due" in plan


@pytest.mark.needs_postgres
async def test_a_database_step_reads_no_ended_saga_also_without_statistics(postgres_url):
    async def inside(ctx, tx): ...

    store = open_store(postgres_url)
    await create_all(store)
    many = "FROM generate_series(1, 3000) AS n"
    async with begin(store) as tx:
        await tx.execute(
            text(f"INSERT INTO saga SELECT n, 's', 'completed', false, '0', '', '', 0, NULL, '', 0, 0 {many}")
        )
        await tx.execute(text(f"INSERT INTO saga_step SELECT n, 0, 'a', 'done', 1, 0 {many}"))
    runner = await started(store, Saga("s", [DbStep("a", inside), DbStep("b", inside), DbStep("c", inside)]))
    assert (await settled(runner)).state == "completed"
    await close(store)  # its sessions tell their counts when they end
    query = "SELECT n_tup_upd, seq_tup_read FROM pg_stat_user_tables WHERE relname IN ('saga', 'saga_step')"

    async def counts():
        async with begin(store) as tx:
            rows = (await tx.execute(text(query))).all()
        return rows if all(row.n_tup_upd >= 3 for row in rows) else None

    assert [row.seq_tup_read for row in await until(counts, 20, "the server's counts")] == [0, 0]
    await close(store)


def test_saga_with_doubtful_steps_is_refused():
    step = World().step("a")
    with pytest.raises(ValueError, match="different names"):
        Saga("trip", [step, step])
    with pytest.raises(ValueError, match="needs steps"):
        Saga("trip", [])
    with pytest.raises(ValueError, match="only its first steps"):
        Saga("trip", [step, DbStep("b")])


async def cancelled(store, runner, saga_id="s1"):
    async with begin(store) as tx:
        return await runner.cancel(tx, saga_id, by="ann", reason="changed my mind")


async def test_a_customer_cancels_a_saga_that_waits_and_one_that_completed(store):
    slow = RetryPolicy(base=300, cap=300, attempts=5)
    world = World(b=[Transient("down for days"), {"id": 2}])
    saga = Saga("trip", [world.step("a"), world.step("b", retry=slow)])
    runner = await started(store, saga)
    await runner.run("s1")
    assert await cancelled(store, runner)
    row = await settled(runner)
    assert (row.state, row.error) == ("compensated", "changed my mind")
    assert world.calls == ["a", "b", "undo b", "undo a"]
    assert not await cancelled(store, runner), "it went back already"

    world.calls.clear()
    await started(store, saga, "s2")
    assert (await settled(runner, "s2")).state == "completed"
    assert await cancelled(store, runner, "s2")
    assert (await settled(runner, "s2")).state == "compensated"
    assert world.calls == ["a", "b", "undo b", "undo a"]
    assert ("ann", "cancelled", "changed my mind") in [
        (row.actor, row.event, row.detail) for row in await saga_store.history(store, "s2")
    ]


async def test_cancelling_in_the_middle_of_a_call_waits_for_its_answer_then_takes_it_back(store):
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_):
        reached.set()
        await go_on.wait()
        return {"id": 1}

    world = World(a=[wait])
    runner = await started(store, Saga("trip", [world.step("a"), world.step("b")]))
    driving = asyncio.create_task(runner.run("s1"))
    await asyncio.wait_for(reached.wait(), 10)
    assert await cancelled(store, runner)
    assert world.calls == ["a"], "nobody undoes it while it runs"
    go_on.set()
    assert (await driving).state == "compensated"
    assert world.calls == ["a", "undo a"], "b was never begun"
    assert world.contexts["undo a"][0].result == {"id": 1}, "its answer was kept"


async def test_a_cancelled_database_step_leaves_nothing_and_a_final_step_cannot_be_cancelled(store):
    reached, go_on = asyncio.Event(), asyncio.Event()
    world = World()

    async def slow(ctx, tx):
        reached.set()
        await go_on.wait()
        await saga_store.record(tx, "effects", "test", "made")

    runner = await started(store, Saga("trip", [world.step("a"), DbStep("b", slow, retry=FAST)]))
    driving = asyncio.create_task(runner.run("s1"))
    await asyncio.wait_for(reached.wait(), 10)
    if is_postgres(store):  # SQLite's one writer is the step itself: the cancellation waits for it
        assert await cancelled(store, runner)
    go_on.set()
    saga = await driving
    if is_postgres(store):
        assert (await settled(runner)).state == "compensated"
        assert await saga_store.history(store, "effects") == []
    else:
        assert saga.state == "completed"

    final = Saga("ship", [world.step("a"), world.step("ship", final=True)])
    shipping = await started(store, final, "s2")
    assert (await settled(shipping, "s2")).state == "completed"
    with pytest.raises(saga_repair.TooLate, match="ship"):
        await cancelled(store, shipping, "s2")


async def test_a_stuck_undo_does_not_hold_up_what_is_independent_of_it(store):
    world = World(d=[Permanent("no")], **{"undo c": [Permanent("closed"), {}], "undo d": [Transient("503"), {}]})
    free = {"independent": True}
    steps = [world.step("a", **free), world.step("b"), world.step("c"), world.step("d", **free)]
    runner = await started(store, Saga("trip", steps))
    saga = await settled(runner)
    assert saga.state == "needs_repair"
    assert saga.error == "undo of c: Permanent: closed"
    # d failed once, which held up nobody; b depends on c, a on nobody.
    assert sorted(world.calls[4:]) == ["undo a", "undo c", "undo d", "undo d"]
    assert {step.name: step.state for step in saga.steps} == {"a": "undone", "b": "done", "c": "stuck", "d": "undone"}
    await saga_repair.retry(store, "s1", by="ann", note="opened again")
    assert (await settled(runner)).state == "compensated"
    assert world.calls[-2:] == ["undo c", "undo b"]


async def test_a_lost_request_is_not_repeated_after_its_key_is_forgotten(store):
    """A saga that lay for two days: a provider forgets keys after one, and would charge again."""
    world = World(a=[Transient("connection lost"), {"id": 1}])
    step = world.step("a", key_life=0.2, retry=RetryPolicy(base=0.3, cap=0.3, attempts=4, floor=1.0))
    runner = await started(store, Saga("trip", [step]))
    saga = await settled(runner)
    assert saga.state == "needs_repair"
    assert "its key is forgotten" in str(saga.error)
    assert world.calls == ["a"], "it was not made a second time"
    await saga_repair.mark(store, "s1", "a", "done", by="ann", note="seen at the provider's", result={"id": 1})
    assert (await settled(runner)).state == "completed"


async def test_a_request_that_may_still_be_running_is_neither_looked_up_nor_undone(store):
    landed = []

    async def cut(_):
        landed.append(time.time() + 0.3)  # the provider goes on
        raise ConnectionError("cut")

    async def find(_):
        return {"id": 7} if time.time() > landed[-1] else None

    world = World(a=[cut], b=[Permanent("no")], **{"find a": [find], "find b": [None]})
    steps = [world.step("a", resolve=True, longest=0.4), world.step("b", resolve=True, longest=0.1)]
    runner = await started(store, Saga("trip", steps))
    assert (await settled(runner)).state == "compensated"
    # b answered, so there is nothing to wait for; it is not there, so there is nothing to undo.
    assert world.calls == ["a", "find a", "b", "find b", "undo a"]
    assert world.contexts["undo a"][0].result == {"id": 7}
    assert "a waiting" in await events(store)


async def test_crashes_and_lost_answers_of_certain_refusals_consume_no_attempt(store):
    world = World(a=[NotMade("no connection"), {"id": 1}])
    runner = await started(store, Saga("trip", [world.step("a", retry=RetryPolicy(base=0.001, cap=0.001, attempts=2))]))
    for number in range(5):  # as processes leave it that died with it
        async with begin(store) as tx:
            await tx.execute(text(f"UPDATE saga SET due_at = 0, owner = 'dead {number}'"))
            await tx.execute(text("UPDATE saga_step SET state = 'started', sent_at = 1"))
        await runner.run("s1")
        saga = await saga_store.load(store, "s1")
        if saga.state == "completed":
            break
    assert saga.state == "completed"
    assert saga.steps[0].attempts <= 2


async def test_a_woken_runner_starts_a_new_saga_long_before_its_next_poll(store):
    world = World()
    saga = Saga("trip", [world.step("a")])
    runner = SagaRunner(store, saga)
    running = asyncio.create_task(runner.run_forever(poll=60))
    await started(store, saga, "before")  # an idle round or two pass by
    runner.wake()
    await until(lambda: world.calls, 10, "the first saga")
    async with begin(store) as tx:
        await runner.start(tx, "trip", "after", {})
    runner.wake()
    await until(lambda: len(world.calls) == 2, 10, "the second saga, 60 s before the next poll")
    runner.stop()
    await asyncio.wait_for(running, 10)


async def test_a_job_per_saga_drives_it_on_bullmq_and_its_waits_consume_no_attempt(store, redis_url):
    """As the page says: no `run_forever`, and plain jobs without attempts."""
    world = World(pay=[RateLimited("slow down", retry_after=0.1), Transient("503"), {"id": 7}], ship=[Permanent("no")])
    runner = await started(store, Saga("trip", [world.step("pay"), world.step("ship")]))

    async def drive(job, token):
        row = await runner.run(job.data["saga"])
        if row.due_at is not None:
            raise RetryLater(max(0.05, row.due_at - time.time()))
        return row.state

    async with queue_at(redis_url, "sagas") as queue, at_work("sagas", drive, url=redis_url):
        job = await queue.add("drive", {"saga": "s1"}, {"jobId": "s1x"})
        await until_counts(queue, {"completed": 1}, 20, "the job ends with its saga")
        assert (await queue.getJob(job.id)).returnvalue == "compensated"
    assert world.calls == ["pay", "pay", "pay", "ship", "undo ship", "undo pay"]


async def test_tables_of_an_older_version_get_the_new_columns(store):
    world = World()
    runner = await started(store, Saga("trip", [world.step("a")]))
    async with begin(store) as tx:
        for column in ("sent_at", "undo_sent_at", "retry_at", "crashes"):
            await tx.execute(text(f"ALTER TABLE saga_step DROP COLUMN {column}"))
        await tx.execute(text("ALTER TABLE saga DROP COLUMN cancel"))
    await create_all(store)
    assert (await settled(runner)).state == "completed"


async def test_one_refused_change_does_not_take_the_others_of_its_commit_with_it(store):
    """Sagas that are driven side by side share transactions: one is taken away from its driver."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait(ctx):
        if len(world.calls) == 5:
            reached.set()
        await go_on.wait()
        return {"id": ctx.saga_id}

    world = World(a=[wait])
    saga = Saga("trip", [world.step("a")])
    for number in range(5):
        runner = await started(store, saga, f"s{number}")
    driving = asyncio.create_task(runner.resume_due())
    await asyncio.wait_for(reached.wait(), 10)
    await saga_repair.compensate(store, "s2", by="ann", note="stop", force=True)
    go_on.set()
    await driving
    states = {row.id: row.state for row in await saga_store.list_sagas(store)}
    assert states.pop("s2") == "compensating"
    assert set(states.values()) == {"completed"}


@pytest.mark.needs_postgres
async def test_a_full_connection_limit_delays_sagas_and_costs_no_attempt_and_no_crash(postgres_url, caplog):
    once = RetryPolicy(base=0.05, cap=0.1, attempts=1)

    async def inside(ctx, tx):
        await tx.execute(text("SELECT pg_sleep(0.05)"))

    limits = {"retry": once, "crashes": 1, "deadline": 5.0}
    saga = Saga("s", [DbStep("first", inside, **limits), DbStep("second", inside, **limits)])
    admin, user = open_store(postgres_url), f"app{uuid.uuid4().hex[:8]}"
    await create_all(admin)
    async with begin(admin) as tx:
        await tx.execute(text(f"CREATE ROLE {user} LOGIN CONNECTION LIMIT 2"))
        await tx.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {user}"))
        await tx.execute(text(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {user}"))
        for number in range(20):
            await SagaRunner(admin, saga).start(tx, "s", f"s-{number}", {})
    store = open_store(postgres_url.replace("test@", f"{user}@"))
    runner = SagaRunner(store, saga, lease_margin=0.5)
    running = asyncio.create_task(runner.run_forever(poll=0.1))
    try:
        full = lambda: caplog.text.count("left to the next runner") >= 5  # noqa: E731
        await until(full, 60, "drivers that get no connection")
        async with begin(admin) as tx:
            await tx.execute(text(f"ALTER ROLE {user} CONNECTION LIMIT -1"))

        async def ended():
            return all(each.due_at is None for each in await saga_store.list_sagas(admin))

        await until(ended, 60, "every saga has ended", every=0.2)
    finally:
        runner.stop()
        await running
    history = {line.event for n in range(20) for line in await saga_store.history(admin, f"s-{n}")}
    assert {each.state for each in await saga_store.list_sagas(admin)} == {"completed"}, history
    assert "taken over" not in history
    await close(store)
    await close(admin)


async def test_a_commit_that_is_still_running_is_waited_for_before_its_outcome_is_read(store):
    """Its answer was given up: read too soon the step was pending, and its effect was made again."""
    await started(store, Saga("trip", [World().step("a")]))
    async with begin(store) as tx:
        await tx.execute(text("UPDATE saga SET error = 'committed late' WHERE id = 's1'"))
        assert (await saga_store.load(store, "s1")).error is None
        looking = asyncio.create_task(saga_store.load(store, "s1", wait=True))
        done, _ = await asyncio.wait([looking], timeout=0.5)
        assert not done
    assert (await looking).error == "committed late"


# Outside steps share their commits. A DbStep: begin, effect, its record and commit.
@pytest.mark.parametrize(
    ("step", "postgres", "sqlite"), [(SagaStep, 1.5, 1.0), (DbStep, 8.0, 8.0)], ids=["outside", "inside"]
)
async def test_a_saga_waits_for_the_store_only_a_few_times(store, monkeypatch, step, postgres, sqlite):
    """Its waits for the server and for other threads set a runner's rate, on any machine."""
    count, waits = 64, 0

    async def nothing(ctx, tx=None):
        if tx is not None:
            await tx.execute(text("SELECT 1"))

    runner = SagaRunner(store, Saga("s", [step("a", nothing), SagaStep("b", nothing), step("c", nothing)]))
    async with begin(store) as tx:
        for number in range(count):
            await runner.start(tx, "s", f"s-{number}", {})

    def counted(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            nonlocal waits
            waits += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(open_store_module._connection_class(), "wait")
    counted(aiosqlite.Connection, "_execute")
    counted(ThreadPoolExecutor, "submit")
    while await runner.resume_due(32):
        pass
    assert waits
    assert waits / count <= (postgres if is_postgres(store) else sqlite)
    assert {row.state for row in await saga_store.list_sagas(store)} == {"completed"}
