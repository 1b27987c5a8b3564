"""One door to the database: SQLite for a laptop, PostgreSQL for a fleet, the same code for both.

Promises
- `begin(engine)` is a write transaction from its first statement: it commits as a whole or leaves nothing.
- A committed transaction survives `kill -9` of any process, on both databases.
- Writers queue instead of failing: a read-then-write under plain BEGIN got 1,335 SQLITE_BUSY in 2,000 tries
  although busy_timeout was set (two readers cannot both become the writer); BEGIN IMMEDIATE got none.
- `read(engine)` sees one snapshot on SQLite, one per statement on PostgreSQL, and refuses to write on both.
- An outage (server down, disk full, file locked or read-only, no connection free) is a `StoreUnavailable` on
  both, so that a job that meets one waits for its end and consumes no attempt. `is_outage` is the one judge.
- No error shows a statement's values: they are people's names and addresses.

When they do not hold
- Power loss on SQLite: `synchronous=NORMAL` (the default here) may take back the last commits, but never
  tears one. Add `?synchronous=full` to the URL to make every commit wait for the disk.
- SQLite on a network file system: its locks do not work there. Use PostgreSQL.
- Slow work inside `begin`: SQLite has one writer, so everybody waits, and gets `StoreBusy` after `LOCK_WAIT`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Connection, Engine, MetaData, create_engine, event, inspect, make_url, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from .errors import Permanent, Unavailable, describe

__all__ = [
    "NestedBegin",
    "StoreBusy",
    "StoreUnavailable",
    "WrongStoreUrl",
    "begin",
    "close",
    "create_all",
    "in_one_hop",
    "is_outage",
    "is_postgres",
    "metadata",
    "open_store",
    "ping",
    "read",
]

T = TypeVar("T")

LOCK_WAIT = 10.0  # seconds a writer waits for its turn; the same on both databases
CONNECT_WAIT = 5  # seconds until an unreachable server is an error
_SCHEMA_LOCK = 0x51756575  # any number, the same in every process: serialises CREATE TABLE on PostgreSQL
_POSTGRES_SESSION = (
    f"-c lock_timeout={int(LOCK_WAIT * 1000)} "
    # A process that is frozen in the middle of a transaction must not keep its row locks for ever.
    "-c idle_in_transaction_session_timeout=60000"
)

# Disk full, locked by others, gone, broken, read-only: no fault of the statement that met it.
_SQLITE_AWAY = ("FULL", "BUSY", "LOCKED", "CANTOPEN", "IOERR", "READONLY_", "PROTOCOL")
# Connection, resources (disk, memory, connections), shutdown and start, the server's own input and output.
_POSTGRES_AWAY = ("08", "53", "57P", "58")
_READ_ONLY = (
    "SQLITE_READONLY",
    "25006",
)  # a standby or a read-only file; inside `read` a mistake of the caller

metadata = MetaData()  # every pattern declares its tables here
_turns: WeakKeyDictionary[Engine, asyncio.Lock] = WeakKeyDictionary()
_holders: WeakKeyDictionary[asyncio.Lock, asyncio.Task[object] | None] = WeakKeyDictionary()
_hops: WeakKeyDictionary[Engine, tuple[Engine, Engine, ThreadPoolExecutor]] = WeakKeyDictionary()


class WrongStoreUrl(ValueError):
    """The database URL cannot be used. Give `sqlite:////absolute/path.db` or `postgresql://user@host/name`."""


class StoreUnavailable(Unavailable):
    """The database cannot be used: is the server up, is the disk full, and may this user write the file?"""


class StoreBusy(StoreUnavailable):
    """No write turn in time: is slow work done inside `begin`, here or in another process?"""


class NestedBegin(Permanent):
    """One `begin` nested in another would wait for itself: pass the outer one's connection on."""


def is_outage(error: BaseException | None, *, writing: bool = False) -> bool:
    """Is the database away, or was the statement at fault? SQLite calls a missing table "operational" too.

    `writing`: the transaction was meant to write, so "read-only" means that the database cannot.
    """
    if isinstance(error, Unavailable | PoolTimeout):
        return True
    operational = isinstance(error, OperationalError | InterfaceError)
    if isinstance(error, DBAPIError):
        if error.connection_invalidated:
            return True
        error = error.orig
    code = getattr(error, "sqlite_errorname", "") or getattr(error, "sqlstate", "")
    if code is None:  # psycopg without a code from the server: there was none to give it
        driver = sys.modules["psycopg"]
        return operational or isinstance(error, (driver.OperationalError, driver.InterfaceError))
    if writing and code in _READ_ONLY:
        return True
    return code.removeprefix("SQLITE_").startswith(_SQLITE_AWAY if "_" in code else _POSTGRES_AWAY)


def open_store(url: str) -> AsyncEngine:
    """Check that the database is there (blocks for at most `CONNECT_WAIT` s), then return its engine."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise WrongStoreUrl(f"{WrongStoreUrl.__doc__} It does not parse as a URL.") from error
    kind = parsed.drivername.split("+")[0]
    if kind == "sqlite":
        return _open_sqlite(parsed)
    if kind in ("postgresql", "postgres"):
        return _open_postgres(parsed)
    raise WrongStoreUrl(f"{WrongStoreUrl.__doc__} Got {parsed.render_as_string(hide_password=True)!r}.")


@asynccontextmanager
async def begin(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A write transaction: commits when the block ends, rolls back when it raises."""
    with _named_outage(writing=True):
        if is_postgres(engine):
            async with engine.begin() as connection:
                yield connection
            return
        async with _turn(engine), engine.connect() as connection:
            await connection.begin()
            yield connection
            await connection.commit()


@asynccontextmanager
async def _turn(engine: AsyncEngine) -> AsyncIterator[None]:
    # Writers of one process take turns here, first come first served. SQLite's own busy handler sleeps and
    # polls, up to 100 ms at a time and without any order, while holding a pooled connection.
    turn = _turns.setdefault(engine.sync_engine, asyncio.Lock())
    if _holders.get(turn) is (task := asyncio.current_task()):
        raise NestedBegin(NestedBegin.__doc__)
    try:
        async with asyncio.timeout(LOCK_WAIT):
            await turn.acquire()
    except TimeoutError:
        raise StoreBusy(f"{StoreBusy.__doc__} Waited {LOCK_WAIT:g} s.") from None
    _holders[turn] = task
    try:
        yield
    finally:
        _holders[turn] = None
        turn.release()


@contextmanager
def _named_outage(*, writing: bool) -> Iterator[None]:
    try:
        yield
    except (DBAPIError, PoolTimeout, sqlite3.Error) as error:
        if not is_outage(error, writing=writing):
            raise
        cause = (error.orig if isinstance(error, DBAPIError) else None) or error
        if getattr(cause, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
            raise StoreBusy(f"{StoreBusy.__doc__} Another process held it {LOCK_WAIT:g} s.") from error
        raise StoreUnavailable(f"{StoreUnavailable.__doc__} {describe(cause, 500)}") from error


@asynccontextmanager
async def read(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection for SELECTs. A write in here is an error, not a silent roll-back."""
    reading = engine.execution_options(store_read=True, postgresql_readonly=True)
    with _named_outage(writing=False):
        async with reading.connect() as connection:
            yield connection


async def ping(engine: AsyncEngine) -> None:
    """Does it answer? For readiness probes."""
    async with read(engine) as connection:
        await connection.execute(text("SELECT 1"))


async def in_one_hop(engine: AsyncEngine, work: Callable[[Connection], T], *, write: bool) -> T:
    """Run the synchronous `work(connection)` in one transaction: for short, frequent, batched statements.

    The async SQLite driver changes threads for every statement, begin and commit; this does it once. Measured
    on no-op jobs with their markers, it saves more than half of the database's share.
    """
    if is_postgres(engine):
        async with begin(engine) if write else read(engine) as connection:
            return await connection.run_sync(work)
    reader, writer, threads = _hops[engine.sync_engine]
    run = asyncio.get_running_loop().run_in_executor
    with _named_outage(writing=write):
        if not write:
            return await run(threads, _transact, reader, work)
        async with _turn(engine):
            return await run(threads, _transact, writer, work)


def _transact(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.connect() as connection:
        connection.begin()
        done = work(connection)
        connection.commit()
        return done


async def create_all(engine: AsyncEngine) -> None:
    """Create the tables and indexes that are missing. Safe when several processes start at once."""
    async with begin(engine) as tx:
        if is_postgres(engine):
            # CREATE TABLE IF NOT EXISTS still collides in pg_type when two sessions run it together.
            await tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
        await tx.run_sync(_create_missing)


def _create_missing(tx: Connection) -> None:
    metadata.create_all(tx)
    # Which leaves a table alone that is there, and with it the index that a newer version of a pattern needs.
    found = {
        (table, index["name"])
        for (_, table), each in inspect(tx).get_multi_indexes().items()
        for index in each
    }
    for table in metadata.sorted_tables:
        for index in table.indexes:
            if (table.name, index.name) not in found:
                index.create(tx)


def is_postgres(engine: AsyncEngine) -> bool:
    return engine.dialect.name == "postgresql"


async def close(engine: AsyncEngine) -> None:
    await engine.dispose()
    if hop := _hops.pop(engine.sync_engine, None):
        reader, writer, threads = hop
        threads.shutdown(wait=False)
        reader.dispose()
        writer.dispose()


def _open_sqlite(url: URL) -> AsyncEngine:
    path = url.database or ""
    if not Path(path).is_absolute():
        # A relative path means another file after a chdir; :memory: means another database per connection.
        raise WrongStoreUrl(f"{WrongStoreUrl.__doc__} Got {path or 'no path'!r}, which is not absolute.")
    options = {key: str(value).upper() for key, value in url.query.items()}
    synchronous = options.pop("SYNCHRONOUS", options.pop("synchronous", "NORMAL"))
    if options or synchronous not in ("NORMAL", "FULL"):
        raise WrongStoreUrl(f"{WrongStoreUrl.__doc__} The only option is ?synchronous=normal or full.")
    _switch_to_wal(path)
    logging.getLogger("aiosqlite").setLevel(
        logging.INFO
    )  # at DEBUG it writes every statement with its values
    # None: Python's sqlite3 opens no transactions of its own; _begin below is the only place that does.
    connect_args = {"isolation_level": None, "timeout": LOCK_WAIT}
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=path),
        connect_args=connect_args,
        pool_size=8,
        max_overflow=0,
        pool_timeout=LOCK_WAIT,
        hide_parameters=True,
    )
    in_threads = {**connect_args, "check_same_thread": False}
    writer, reader = (
        create_engine(URL.create("sqlite", database=path), connect_args=in_threads, hide_parameters=True)
        for _ in range(2)
    )
    for each in (engine.sync_engine, reader, writer):
        _govern(each, synchronous)
    reader.update_execution_options(store_read=True)
    threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="store")
    _hops[engine.sync_engine] = (reader, writer, threads)
    return engine


def _govern(engine: Engine, synchronous: str) -> None:
    event.listen(engine, "handle_error", _hide_values)

    @event.listens_for(engine, "connect")
    def _connected(dbapi_connection: sqlite3.Connection, _record: object) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA synchronous={synchronous}")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "invalidate")
    def _cut_off(dbapi_connection: sqlite3.Connection, _record: object, _error: object) -> None:
        # A task cancelled in the middle of a statement: the connection is closed as it is. SQLite keeps one with
        # an open cursor as a zombie that still holds the write lock, and every writer then waits in vain.
        with suppress(Exception):
            dbapi_connection.rollback()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        reading = connection.get_execution_options().get("store_read", False)
        if connection.info.get("reading", False) != reading:
            connection.exec_driver_sql(f"PRAGMA query_only={'ON' if reading else 'OFF'}")
            connection.info["reading"] = reading
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _switch_to_wal(path: str) -> None:
    """Once per file, and with retries: processes that start together collide here despite busy_timeout."""
    deadline = time.monotonic() + CONNECT_WAIT
    while True:
        try:
            connection = sqlite3.connect(path, timeout=CONNECT_WAIT)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            finally:
                connection.close()
            return
        except sqlite3.DatabaseError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise StoreUnavailable(f"Cannot open {path} as an SQLite database: {error}.") from error
            time.sleep(0.02)


def _open_postgres(url: URL) -> AsyncEngine:
    try:
        import psycopg
    except ImportError as error:
        raise StoreUnavailable("PostgreSQL needs a driver: pip install 'psycopg[binary]'.") from error
    where = url.render_as_string(hide_password=True)
    url = url.set(drivername="postgresql+psycopg")
    if "connect_timeout" not in url.query:
        url = url.update_query_dict({"connect_timeout": str(CONNECT_WAIT)})
    try:
        psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False)).close()
    except psycopg.Error as error:
        raise StoreUnavailable(f"{StoreUnavailable.__doc__} Tried {where}: {error}") from error
    engine = create_async_engine(
        url,
        connect_args={} if "options" in url.query else {"options": _POSTGRES_SESSION},
        pool_pre_ping=True,  # after a server restart the first job should not pay with an attempt
        pool_size=8,
        max_overflow=8,
        pool_timeout=LOCK_WAIT,
        hide_parameters=True,
    )
    event.listen(engine.sync_engine, "handle_error", _hide_values)
    return engine


def _hide_values(context: ExceptionContext) -> None:
    """`hide_parameters` covers SQLAlchemy's words; PostgreSQL's own quote the row: "Key (email)=(ann@…) exists"."""
    error: Any = context.original_exception
    said = getattr(getattr(error, "diag", None), "message_primary", None)
    if type(error) is ValueError:  # a column type's own: "could not convert string to float: '…'"
        said = str(error)
    if not said:
        return
    if (getattr(error, "sqlstate", None) or "22").startswith(
        "22"
    ):  # data: even the first line quotes the value
        said = re.sub(r"(['\"]).*\1", "…", said, flags=re.DOTALL)
    if context.sqlalchemy_exception is not None:
        wrapped = str(context.sqlalchemy_exception.args[0])
        context.sqlalchemy_exception.args = (wrapped.replace(str(error), said),)
    error.args = (said,)
