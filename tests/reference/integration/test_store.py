"""The store's promises, on a real SQLite file and a real PostgreSQL."""

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest
import uvloop
from sqlalchemy import Column, ForeignKey, Integer, Table, insert, make_url, select, text, update
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.exc import DBAPIError, IntegrityError

from harness.ports import free_port
from harness.waiting import until
from studyhall.patterns.core import open_store as opening
from studyhall.patterns.core import store as store_module
from studyhall.patterns.core.open_store import TableTaken, WrongStoreUrl, close, create_all, open_store
from studyhall.patterns.core.store import (
    NestedBegin,
    StoreBusy,
    StoreUnavailable,
    begin,
    in_one_hop,
    is_outage,
    is_postgres,
    metadata,
    read,
)
from studyhall.patterns.idempotency import inbox
from studyhall.patterns.saga.store import finish

PROGRAMS = Path(__file__).parent / "programs"

counters = Table(
    "test_store_counters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("n", Integer, nullable=False),
    Column("parent", ForeignKey("test_store_counters.id")),
    extend_existing=True,
)


async def add(store, row_id=1):
    async with begin(store) as tx:
        await tx.execute(insert(counters).values(id=row_id, n=0))


async def value(store, row_id=1):
    async with read(store) as connection:
        return await connection.scalar(select(counters.c.n).where(counters.c.id == row_id))


async def increment(store):
    """Read, then write: the shape that fails under SQLite's plain BEGIN."""
    async with begin(store) as tx:
        query = select(counters.c.n).where(counters.c.id == 1).with_for_update()
        n = (await tx.execute(query)).scalar_one()
        await tx.execute(update(counters).where(counters.c.id == 1).values(n=n + 1))


async def test_a_block_that_raises_leaves_nothing(store):
    async def half_done():
        async with begin(store) as tx:
            await tx.execute(insert(counters).values(id=1, n=0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await half_done()
    assert await value(store) is None
    await add(store)
    assert await value(store) == 0


async def test_a_write_in_a_read_block_is_an_error_not_a_silent_rollback(store):
    with pytest.raises(DBAPIError, match=r"read-?only"):
        async with read(store) as connection:
            await connection.execute(insert(counters).values(id=1, n=0))
    await add(store)  # the same pooled connection may write again
    assert await value(store) == 0


@pytest.mark.parametrize(
    "statement",
    ["SELECT * FROM missing", "SELEC 1", "INSERT INTO test_store_counters (id) VALUES (1)"],
    ids=["missing table", "syntax", "not null"],
)
async def test_a_wrong_statement_is_not_an_outage(store, statement):
    """SQLite calls a missing table an OperationalError too: waiting would never end."""
    with pytest.raises(DBAPIError) as raised:
        async with begin(store) as tx:
            await tx.execute(text(statement))
    assert not is_outage(raised.value)
    with pytest.raises(DBAPIError) as raised:
        async with read(store) as connection:
            await connection.execute(insert(counters).values(id=1, n=0))
    assert not is_outage(raised.value), "a write in a read block is the caller's mistake"


async def test_a_database_that_became_read_only_is_an_outage(store):
    """A standby after a failover, a file system remounted after an error."""
    standby = "SET TRANSACTION READ ONLY" if is_postgres(store) else "PRAGMA query_only=ON"

    async def write():
        async with begin(store) as tx:
            await tx.execute(text(standby))
            await tx.execute(insert(counters).values(id=1, n=0))

    with pytest.raises(StoreUnavailable, match=r"read-?only"):
        await write()


@pytest.mark.needs_postgres
async def test_no_free_connection_and_a_cut_one_are_outages(own_postgres):
    own_postgres.execute("CREATE ROLE one_at_a_time LOGIN CONNECTION LIMIT 1")
    store = open_store(own_postgres.url.replace("test@", "one_at_a_time@"))
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'one_at_a_time'"

    async def work():
        async with begin(store) as tx:
            with pytest.raises(StoreUnavailable, match="too many connections"):
                await value(store)
            own_postgres.execute(cut)
            await tx.execute(text("SELECT 1"))

    with pytest.raises(StoreUnavailable, match="terminating connection"):
        await work()
    await close(store)


async def test_concurrent_read_then_write_transactions_lose_no_update(store):
    await add(store)
    await asyncio.gather(*(increment(store) for _ in range(100)))
    assert await value(store) == 100


async def test_plain_begin_on_sqlite_fails_where_begin_immediate_does_not(tmp_path):
    """The naive twin: two readers that both want to become the writer; busy_timeout does not help."""
    path = tmp_path / "naive.db"
    store = open_store(f"sqlite:///{path}")
    await create_all(store)
    await add(store)
    first, second = (sqlite3.connect(path, isolation_level=None, timeout=1) for _ in range(2))
    for connection in (first, second):
        connection.execute("BEGIN")
        connection.execute("SELECT n FROM test_store_counters").fetchall()
    first.execute("UPDATE test_store_counters SET n = n + 1")
    first.execute("COMMIT")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        second.execute("UPDATE test_store_counters SET n = n + 1")
    first.close()
    second.close()
    await increment(store)
    assert await value(store) == 2
    await close(store)


async def test_cancelled_writers_release_their_turn_and_connection(store):
    await add(store)
    for _ in range(5):
        tasks = [asyncio.create_task(increment(store)) for _ in range(20)]
        await asyncio.sleep(0.005)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None for result in done[1::2]), done
    before = await value(store)
    await asyncio.wait_for(increment(store), 5)
    assert await value(store) == (before or 0) + 1


async def test_work_in_one_hop_is_one_transaction_too(store):
    def half_done(tx):
        tx.execute(insert(counters).values(id=1, n=0))
        raise ZeroDivisionError

    def write(tx):
        tx.execute(insert(counters).values(id=1, n=7))
        return "done"

    with pytest.raises(ZeroDivisionError):
        await in_one_hop(store, half_done, write=True)
    assert await value(store) is None
    with pytest.raises(DBAPIError, match=r"read-?only"):
        await in_one_hop(store, write, write=False)
    assert await in_one_hop(store, write, write=True) == "done"
    assert await value(store) == 7


async def test_hops_and_transactions_take_turns_and_lose_no_update(store):
    await add(store)

    def one_more(tx):
        n = tx.execute(select(counters.c.n).where(counters.c.id == 1).with_for_update()).scalar_one()
        tx.execute(update(counters).where(counters.c.id == 1).values(n=n + 1))

    hops = [in_one_hop(store, one_more, write=True) for _ in range(50)]
    await asyncio.gather(*hops, *(increment(store) for _ in range(50)))
    assert await value(store) == 100


async def test_cancelled_hops_release_their_turn(store):
    await add(store)

    def slowly(tx):
        tx.execute(update(counters).values(n=counters.c.n + 1))
        time.sleep(0.05)

    tasks = [asyncio.create_task(in_one_hop(store, slowly, write=True)) for _ in range(6)]
    await asyncio.sleep(0.02)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    before = await until(lambda: value(store), what="the hops that went on are committed")
    assert before >= 3
    await asyncio.wait_for(increment(store), 5)


async def test_a_statement_gives_its_rows_and_counts(store):
    """On SQLite the cursor is ours."""
    rows, ids = [{"id": n, "n": 0} for n in range(2, 9)], counters.c.id
    async with begin(store) as tx:
        assert (await tx.execute(insert(counters).values(n=1))).inserted_primary_key == (1,)
        assert (await tx.execute(insert(counters).returning(ids), rows[:3])).all() == [(2,), (3,), (4,)]
        assert (await tx.execute(update(counters).where(ids > 2).values(n=0))).rowcount == 2
        await tx.execute(insert(counters), rows[3:])
        assert [row.id async for row in await tx.stream(select(ids).order_by(ids))] == [*range(1, 9)]


async def test_last_work_that_fails_leaves_nothing(store):
    def slowly(tx):
        tx.execute(update(counters).values(n=counters.c.n + 1))
        time.sleep(0.1)
        raise ZeroDivisionError

    async def work():
        async with begin(store) as tx:
            await tx.execute(update(counters).values(n=counters.c.n + 1))
            await finish(tx, slowly)

    await add(store)
    for limit in (0.05, 5):
        with pytest.raises((TimeoutError, ZeroDivisionError)):
            await asyncio.wait_for(work(), limit)
    await asyncio.wait_for(increment(store), 5)
    assert await value(store) == 1


async def test_nested_begin_on_sqlite_is_a_named_error_not_a_deadlock(tmp_path, monkeypatch):
    for module in (store_module, opening):
        monkeypatch.setattr(module, "LOCK_WAIT", 0.2)
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")
    async with begin(store):
        with pytest.raises(NestedBegin, match="nested"):
            async with begin(store):
                pass

        async def other_task():
            async with begin(store):
                pass

        with pytest.raises(StoreBusy, match="slow work"):
            await asyncio.create_task(other_task())
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="Another process"):
        async with begin(store):
            pass
    other.close()
    async with begin(store) as tx:
        assert (await tx.execute(text("SELECT 1"))).scalar_one() == 1
    await close(store)


@pytest.mark.parametrize("hop", [False, True, None])
async def test_a_refused_commit_leaves_no_transaction_open(store, hop):
    """SQLite kept it, with the write lock: the next writer met a transaction within a transaction."""
    deferred = "REFERENCES parents(id) DEFERRABLE INITIALLY DEFERRED"

    async def write(statement):
        if hop:
            return await in_one_hop(store, lambda tx: tx.execute(text(statement)).rowcount, write=True)
        async with begin(store) as tx:
            met = (await tx.execute(text(statement))).rowcount
            if hop is None:
                await finish(tx, lambda tx: None)
            return met

    await write("CREATE TABLE parents (id integer PRIMARY KEY)")
    await write(f"CREATE TABLE children (parent integer {deferred})")
    for _ in range(3):
        with pytest.raises(IntegrityError):
            await write("INSERT INTO children VALUES (1)")
    assert await write("INSERT INTO parents VALUES (1)") == 1
    assert await write("INSERT INTO children VALUES (1)") == 1


async def test_foreign_keys_are_enforced(store):
    with pytest.raises(IntegrityError):
        async with begin(store) as tx:
            await tx.execute(insert(counters).values(id=1, n=0, parent=99))


@pytest.mark.parametrize(("query", "level"), [("", 1), ("?synchronous=full", 2)])
async def test_sqlite_runs_in_wal_with_the_chosen_durability(tmp_path, query, level):
    store = open_store(f"sqlite:///{tmp_path / 's.db'}{query}")
    async with read(store) as connection:
        assert (await connection.execute(text("PRAGMA journal_mode"))).scalar_one() == "wal"
        assert (await connection.execute(text("PRAGMA synchronous"))).scalar_one() == level
        assert (await connection.execute(text("PRAGMA busy_timeout"))).scalar_one() == 10_000
    await close(store)


async def test_a_durable_commit_waits_for_the_disk_and_the_next_one_does_not(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")

    async def level(**options):
        async with begin(store, **options) as tx:
            return int((await tx.execute(text("PRAGMA synchronous"))).scalar_one())

    assert [await level(), await level(durable=True), await level()] == [1, 2, 1]
    await close(store)


async def test_a_relative_path_is_the_same_file_after_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite:///s.db")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    await create_all(store)
    await add(store)
    assert await value(store) == 0
    assert (tmp_path / "s.db").exists()
    assert list(elsewhere.iterdir()) == []
    await close(store)


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "mysql://user:secret@host/db",
        "postgresql://user:secret@host:port/db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:////tmp/x.db?journal=off",
        "sqlite:////tmp/x.db?synchronous=off",
    ],
)
def test_wrong_urls_say_what_to_give_and_never_show_the_password(url):
    with pytest.raises(WrongStoreUrl, match="sqlite:///path") as raised:
        open_store(url)
    assert "secret" not in str(raised.value)


def test_an_unreachable_server_or_unusable_file_is_an_error_within_seconds(tmp_path):
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="server up") as raised:
        open_store(f"postgresql://me:secret@127.0.0.1:{free_port()}/db")
    assert "secret" not in str(raised.value)
    with pytest.raises(StoreUnavailable, match="unable to open"):
        open_store(f"sqlite:///{tmp_path / 'missing' / 's.db'}")
    (tmp_path / "text.db").write_text("this is no database, it is a text file" * 50)
    with pytest.raises(StoreUnavailable, match="not a database"):
        open_store(f"sqlite:///{tmp_path / 'text.db'}")
    assert time.monotonic() - started < 15


def test_works_under_uvloop(store_url):
    async def use():
        store = open_store(store_url)
        await create_all(store)
        await add(store)
        await asyncio.gather(*(increment(store) for _ in range(20)))
        answer = await value(store)
        await close(store)
        return answer

    assert uvloop.run(use()) == 20


async def test_processes_starting_at_once_all_get_their_tables_and_lose_no_update(store_url, spawn):
    children = [spawn(PROGRAMS / "store_starter.py", store_url, 25) for _ in range(4)]
    assert [await child.exited(60) for child in children] == [0] * 4, "\n".join(map(str, children))
    store = open_store(store_url)
    async with read(store) as connection:
        total = (await connection.execute(text("SELECT n FROM starters"))).scalar_one()
    assert total == 100
    await close(store)


@pytest.mark.needs_postgres
async def test_a_restart_of_postgres_costs_no_transaction_afterwards(own_postgres):
    store = open_store(own_postgres.url)
    assert is_postgres(store)
    await create_all(store)
    await add(store)
    own_postgres.kill()
    with pytest.raises(StoreUnavailable):
        await increment(store)
    own_postgres.restart()
    for _ in range(10):
        await increment(store)
    assert await value(store) == 10
    await close(store)


@pytest.mark.needs_postgres
async def test_a_connection_cut_a_moment_ago_is_replaced(own_postgres, monkeypatch):
    store, pings, real = open_store(own_postgres.url), [], psycopg.PGDialectAsync_psycopg.do_ping
    monkeypatch.setattr(psycopg.PGDialectAsync_psycopg, "do_ping", lambda *args: pings.append(1) or real(*args))
    await create_all(store)
    await add(store)
    others = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE query = 'COMMIT'"
    for limit, cut, asked in ((60, False, 0), (60, True, 1), (0, False, 2)):
        monkeypatch.setattr(opening, "PING_AFTER", limit)
        if cut:
            own_postgres.execute(others)
        await increment(store)
        assert len(pings) == asked
    await close(store)


@pytest.mark.needs_postgres
async def test_a_lock_that_another_process_keeps_is_an_outage_and_no_failure(postgres_url):
    async def second(store):
        async with begin(store) as tx:
            await tx.execute(text("SET LOCAL lock_timeout = '200ms'"))
            await tx.execute(text("UPDATE kept SET id = 3"))

    store = open_store(postgres_url)
    async with begin(store) as tx:
        await tx.execute(text("CREATE TABLE kept (id integer PRIMARY KEY)"))
        await tx.execute(text("INSERT INTO kept VALUES (1)"))
    async with begin(store) as holder:
        await holder.execute(text("UPDATE kept SET id = 2"))
        with pytest.raises(StoreBusy):
            await second(store)
    await close(store)


@pytest.mark.needs_postgres
async def test_behind_a_pooler_of_transactions_nothing_is_left_to_a_session(postgres_url):
    """PgBouncer in transaction mode: "prepared statement _pg3_0 does not exist", "unsupported startup parameter"."""
    left, behind = {}, make_url(postgres_url).update_query_dict({"pooler": "transaction"})
    for name, url in (("straight", postgres_url), ("pooled", behind.render_as_string(hide_password=False))):
        store = open_store(url)
        async with begin(store) as tx:
            for _ in range(10):
                await tx.execute(text("SELECT 1"))
            prepared = (await tx.execute(text("SELECT count(*) > 0 FROM pg_prepared_statements"))).scalar()
            left[name] = prepared, (await tx.execute(text("SHOW lock_timeout"))).scalar()
        await close(store)
    assert left == {"straight": (True, "10s"), "pooled": (False, "0")}


async def test_a_table_of_somebody_else_is_refused_and_left_as_it_was(store_url):
    """It got our columns beside its own, and no primary key: an insert that counts on one then took duplicates."""
    store = open_store(store_url)
    async with begin(store) as tx:
        await tx.execute(text(f"CREATE TABLE {inbox} (mail TEXT)"))
    with pytest.raises(TableTaken, match=r"inbox has no column consumer\..*Rename it"):
        await create_all(store)
    async with read(store) as tx:
        assert (await tx.execute(text(f"SELECT * FROM {inbox}"))).keys() == {"mail"}
    await close(store)
