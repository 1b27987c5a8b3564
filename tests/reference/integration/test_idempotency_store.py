"""The inbox on a real SQLite file and a real PostgreSQL, within one process and across several."""

import asyncio
import json
import math
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, Table, Text, func, insert, select, update
from sqlalchemy.exc import DBAPIError

from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import StoreUnavailable, begin, metadata, read
from studyhall.patterns.idempotency import Inbox, KeyReused, fingerprint, inbox
from studyhall.patterns.idempotency.markers import SLOW_LOOK, _Look

PROGRAMS = Path(__file__).parent / "programs"
ONE = fingerprint({"cents": 1})
TWO = fingerprint({"cents": 2})

effects = Table(
    "test_inbox_effects",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("key", Text, nullable=False),
    extend_existing=True,
)


def effect(key, result=None):
    async def run(tx):
        await tx.execute(insert(effects).values(key=key))
        return result

    return run


async def count(store):
    async with read(store) as connection:
        return (await connection.execute(select(func.count()).select_from(effects))).scalar_one()


async def test_first_run_and_duplicate_get_equal_results_even_for_tuples(store):
    orders = Inbox(store, "orders")
    assert await orders.once("k", ONE, effect("k", (1, 2))) == await orders.once("k", ONE, effect("k"))


async def test_an_effect_that_raises_leaves_nothing_and_runs_again(store):
    orders = Inbox(store, "orders")

    async def broken(tx):
        await tx.execute(insert(effects).values(key="k"))
        raise ConnectionError("mail server is down")

    with pytest.raises(ConnectionError):
        await orders.once("k", ONE, broken)
    assert await count(store) == 0
    assert await orders.seen("k", ONE) is None
    assert await orders.once("k", ONE, effect("k", "sent")) == "sent"
    assert await count(store) == 1


async def test_the_same_key_with_another_payload_is_an_error(store):
    orders = Inbox(store, "orders")
    await orders.once("k", ONE, effect("k", 1))
    with pytest.raises(KeyReused, match="new key"):
        await orders.once("k", TWO, effect("k", 2))
    with pytest.raises(KeyReused):
        await orders.seen("k", TWO)
    with pytest.raises(KeyReused):
        await orders.record("k", TWO, 2)
    assert await count(store) == 1


async def test_fifty_concurrent_duplicates_make_one_effect_and_equal_results(store):
    orders = Inbox(store, "orders")
    results = await asyncio.gather(*(orders.once("k", ONE, effect("k", {"run": n})) for n in range(50)))
    assert await count(store) == 1
    assert len(results) == 50
    assert all(result == results[0] for result in results)


async def test_duplicates_across_processes_make_one_effect_and_equal_results(store, store_url, spawn, tmp_path):
    """5 processes × 10 tasks, each with a result of its own: all must get the winner's."""
    children = [spawn(PROGRAMS / "inbox_racer.py", store_url, tmp_path / "gun", n) for n in range(5)]
    for child in children:
        await child.line("ready", timeout=60)
    (tmp_path / "gun").touch()
    answers = []
    for child in children:
        answers += json.loads((await child.line("results ", timeout=60)).removeprefix("results "))
    assert len(answers) == 50
    assert len({json.dumps(answer) for answer in answers}) == 1
    async with read(store) as connection:
        assert (await connection.execute(select(func.count()).select_from(inbox))).scalar_one() == 1


async def test_seen_and_record_share_their_transactions(store):
    results = Inbox(store, "results")
    assert await asyncio.gather(*(results.seen(f"k{n}", ONE) for n in range(50))) == [None] * 50
    recorded = await asyncio.gather(*(results.record(f"k{n}", ONE, {"n": n}) for n in range(50)))
    assert recorded == [{"n": n} for n in range(50)]
    stored = await asyncio.gather(*(results.seen(f"k{n}", ONE) for n in range(50)))
    assert [row.result for row in stored if row] == recorded
    async with read(store) as connection:
        times = (await connection.execute(select(func.count(inbox.c.at.distinct())))).scalar_one()
    assert times == 1, "50 concurrent records went into one batch"


async def test_record_returns_the_result_that_stands(store):
    results = Inbox(store, "results")
    both = await asyncio.gather(results.record("k", ONE, "first"), results.record("k", ONE, "second"))
    assert both[0] == both[1]
    assert await results.record("k", ONE, "third") == both[0]


def test_a_look_in_the_loops_own_thread_waits_for_nobody(tmp_path):
    path = str(tmp_path / "locked.db")
    look, rows = _Look(path), lambda tx: tx.exec_driver_sql("SELECT count(*) FROM t", ()).fetchall()
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("CREATE TABLE t (n)")
        assert look(rows) == [(0,)]
        holder.execute("BEGIN EXCLUSIVE")  # without WAL this locks readers out
        began = time.monotonic()
        assert look(rows) is None
        assert time.monotonic() - began < SLOW_LOOK
        holder.execute("ROLLBACK")
        assert look(rows) == [(0,)]
        assert look(lambda tx: tx.exec_driver_sql("INSERT INTO t VALUES (1)", ())) is None, "it only reads"
        # A cold disk: the loop waits once, then the threads do.
        assert look(lambda tx: [time.sleep(SLOW_LOOK * 1.2), rows(tx)][1]) == [(0,)]
        assert look(rows) is None
    look.close()


async def test_a_marker_is_seen_wherever_it_is_looked_up(tmp_path, monkeypatch):
    store = open_store(f"sqlite:///{tmp_path / 'markers.db'}")
    await create_all(store)
    results = Inbox(store, "results")
    await results.record("k", ONE, [1])
    hops, hop = [], results._hop
    monkeypatch.setattr(results, "_hop", lambda work, write: hops.append(write) or hop(work, write=write))
    assert (await results.seen("k", ONE)).result == [1]
    assert hops == [], "no change of threads for a SELECT"
    monkeypatch.setattr(results._look, "_not_before", math.inf)
    assert (await results.seen("k", ONE)).result == [1]
    assert hops == [False]
    await close(store)


async def test_one_bad_row_does_not_fail_its_neighbours(store):
    results = Inbox(store, "results")
    await results.record("taken", ONE, 1)
    answers = await asyncio.gather(
        results.record("good-1", ONE, 1),
        results.record("taken", TWO, 2),
        results.record("surrogate-\ud800", ONE, 3),  # no database can encode this key
        results.record("good-2", ONE, 4),
        return_exceptions=True,
    )
    assert [answers[0], answers[3]] == [1, 4]
    assert isinstance(answers[1], KeyReused)
    assert isinstance(answers[2], (ValueError, DBAPIError))
    assert await results.seen("good-2", ONE) is not None


@pytest.mark.needs_postgres
async def test_a_failed_batch_reaches_every_caller_and_the_next_works(own_postgres):
    store = open_store(own_postgres.url)
    await create_all(store)
    results = Inbox(store, "results")
    own_postgres.kill()
    failed = await asyncio.gather(*(results.record(f"k{n}", ONE, n) for n in range(10)), return_exceptions=True)
    assert all(isinstance(answer, StoreUnavailable) for answer in failed), failed
    own_postgres.restart()
    assert await asyncio.gather(*(results.record(f"k{n}", ONE, n) for n in range(10))) == list(range(10))
    await close(store)


async def test_purge_forgets_old_markers_only_and_in_batches(store):
    orders, others = Inbox(store, "orders"), Inbox(store, "others")
    await asyncio.gather(*(orders.record(f"old-{n}", ONE, n) for n in range(25)), others.record("x", ONE, 0))
    async with begin(store) as tx:
        await tx.execute(update(inbox).values(at=time.time() - 3600))
    await orders.record("new", ONE, 1)
    assert await orders.purge(1800, batch=10) == 25
    assert await orders.seen("new", ONE) is not None
    assert await others.seen("x", ONE) is not None
    assert await orders.purge(1800, batch=10) == 0
    # The stated price: a duplicate that comes after the purge runs again.
    assert await orders.seen("old-1", ONE) is None


async def test_group_commit_pays_off(store, figures, store_url):
    """seen + record by 50 tasks: some fifty markers per commit, and faster than one task alone."""
    results = Inbox(store, "bench")

    async def pairs(tasks, total):
        numbers = iter(range(total))

        async def work():
            for n in numbers:
                key = f"{tasks}-{n}"
                assert await results.seen(key, ONE) is None
                await results.record(key, ONE, {"n": n})

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(tasks)))
        return total / (time.perf_counter() - started)

    alone = await pairs(1, 100)
    tasks = 50
    together = await pairs(tasks, 5000)
    async with read(store) as connection:  # all markers of one batch carry the same time
        of_fifty = select(func.count(inbox.c.at.distinct())).where(inbox.c.key.like("50-%"))
        commits = (await connection.execute(of_fifty)).scalar_one()
    figures(
        "idempotency",
        name=f"seen-and-record-{store_url.split(':', maxsplit=1)[0]}",
        concurrent_tasks=tasks,
        per_second=round(together),
        per_second_one_task=round(alone),
        markers_per_commit=round(5000 / commits, 1),
    )
    assert commits < 5000 / 10
    assert together > alone
