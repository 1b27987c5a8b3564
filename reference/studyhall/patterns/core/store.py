"""One door to the database: SQLite for a laptop, PostgreSQL for a fleet, the same code for both.

A store is an `AsyncEngine` that `open_store` made (`queuesmith add store` brings it). Promises
- `begin(store)` is a write transaction from its first statement: it commits as a whole or leaves nothing.
- A committed transaction survives `kill -9` of any process, on both databases.
- Writers queue instead of failing: a read-then-write under plain BEGIN got 1,335 SQLITE_BUSY in 2,000 tries
  although busy_timeout was set (two readers cannot both become the writer); BEGIN IMMEDIATE got none.
- `read(store)` sees one snapshot on SQLite, one per statement on PostgreSQL, and refuses to write on both.
- An outage (server down, disk full, file locked or read-only, no connection free) is a `StoreUnavailable` on
  both, so that a job that meets one waits for its end and consumes no attempt. `is_outage` decides.

When they do not hold
- Power loss, silent servers: see `open_store`.
- SQLite on a network file system: its locks do not work there. Use PostgreSQL.
- Slow work inside `begin`: SQLite has one writer, so everybody waits, and gets `StoreBusy` after `LOCK_WAIT`.
"""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, MetaData, Table, select
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .failures import Permanent, Unavailable, describe

__all__ = [
    "NestedBegin",
    "StoreBusy",
    "StoreUnavailable",
    "answers_within",
    "begin",
    "in_one_hop",
    "insert",
    "is_outage",
    "is_postgres",
    "metadata",
    "ping",
    "read",
]

T = TypeVar("T")

LOCK_WAIT = 10.0  # seconds a writer waits for its turn; the same on both databases
ANSWER = 12.0  # seconds: more than LOCK_WAIT, after which the server itself ends a wait for a lock

# Disk full, locked by others, gone, broken, read-only: not the statement's fault.
_SQLITE_AWAY = ("FULL", "BUSY", "LOCKED", "CANTOPEN", "IOERR", "READONLY_", "PROTOCOL")
# Connection, resources (disk, memory, connections), a lock timeout, shutdown and start, its own files.
_POSTGRES_AWAY = ("08", "53", "55P03", "57P", "58")
_BUSY = ("SQLITE_BUSY", "55P03")
# A standby or a read-only file; inside `read` a mistake of the caller.
_READ_ONLY = ("SQLITE_READONLY", "25006")


class Hop(NamedTuple):
    """What `in_one_hop` needs of an SQLite file; `open_store` makes it."""

    reader: Engine
    writer: Engine
    threads: Executor


metadata = MetaData()  # every pattern declares its tables here
hops: WeakKeyDictionary[Engine, Hop] = WeakKeyDictionary()
answer_limit: ContextVar[float | None] = ContextVar("store_answers_within", default=None)
_turns: WeakKeyDictionary[Engine, asyncio.Lock] = WeakKeyDictionary()
turn_holders: WeakKeyDictionary[asyncio.Lock, set[asyncio.Task[Any] | None]] = WeakKeyDictionary()


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
    if code is None:  # psycopg, and no server gave a code
        driver = sys.modules["psycopg"]
        return operational or isinstance(error, (driver.OperationalError, driver.InterfaceError))
    if writing and code in _READ_ONLY:
        return True
    return code.removeprefix("SQLITE_").startswith(_SQLITE_AWAY if "_" in code else _POSTGRES_AWAY)


@asynccontextmanager
async def begin(store: AsyncEngine, *, durable: bool = False) -> AsyncIterator[AsyncConnection]:
    """Commits when the block ends, rolls back when it raises. `durable`: it survives even a power loss."""
    with _named_outage(writing=True):
        engine = store.execution_options(store_durable=True) if durable else store
        async with nullcontext() if is_postgres(store) else _turn(store):
            connection = await engine.connect()
            try:
                async with connection.begin():
                    yield connection
                await connection.close()
            except BaseException:
                # In a task: there may be a second cancellation.
                await asyncio.shield(asyncio.create_task(connection.close()))
                raise


@asynccontextmanager
async def _turn(store: AsyncEngine) -> AsyncIterator[None]:
    # Writers of one process take turns here, first come first served. SQLite's own busy handler sleeps and
    # polls, up to 100 ms at a time and without any order, while holding a pooled connection.
    turn = _turns.setdefault(store.sync_engine, asyncio.Lock())
    if (task := asyncio.current_task()) in turn_holders.get(turn, ()):
        raise NestedBegin(NestedBegin.__doc__)
    try:
        async with asyncio.timeout(LOCK_WAIT):
            await turn.acquire()
    except TimeoutError:
        raise StoreBusy(f"{StoreBusy.__doc__} Waited {LOCK_WAIT:g} s.") from None
    turn_holders[turn] = {task}
    try:
        yield
    finally:
        del turn_holders[turn]
        turn.release()


@contextmanager
def _named_outage(*, writing: bool) -> Iterator[None]:
    try:
        yield
    except (DBAPIError, PoolTimeout, sqlite3.Error) as error:
        if not is_outage(error, writing=writing):
            raise
        cause = (error.orig if isinstance(error, DBAPIError) else None) or error
        code = getattr(cause, "sqlite_errorname", "") or getattr(cause, "sqlstate", "") or ""
        if code.startswith(_BUSY):
            raise StoreBusy(f"{StoreBusy.__doc__} Another process held it {LOCK_WAIT:g} s.") from error
        raise StoreUnavailable(f"{StoreUnavailable.__doc__} {describe(cause, 500)}") from error


@asynccontextmanager
async def read(store: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection for SELECTs. A write in here is an error, not a silent roll-back."""
    reading = store.execution_options(store_read=True, postgresql_readonly=True)
    with _named_outage(writing=False):
        async with reading.connect() as connection:
            yield connection


async def ping(store: AsyncEngine) -> None:
    """For readiness probes: does it answer, and has every table this code's columns (else every job fails)?"""
    async with read(store) as connection:
        for table in metadata.sorted_tables:
            await connection.execute(select(table).limit(0))


def _transact(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.connect() as connection, connection.begin():
        return work(connection)


async def in_one_hop(store: AsyncEngine, work: Callable[[Any], T], *, write: bool, transact: Any = _transact) -> T:
    """Run the synchronous `work(connection)` in one transaction: for short, frequent, batched statements.

    The async SQLite driver changes threads for every statement, begin and commit; this does it once."""
    hop = hops.get(store.sync_engine)
    if hop is None:
        async with begin(store) if write else read(store) as connection:
            return await connection.run_sync(work)
    run = asyncio.get_running_loop().run_in_executor
    with _named_outage(writing=write):
        if not write:
            return await run(hop.threads, transact, hop.reader, work)
        async with _turn(store):
            return await run(hop.threads, transact, hop.writer, work)


@contextmanager
def answers_within(seconds: float | None = ANSWER) -> Iterator[None]:
    """A limit for every statement that runs or is started in here (see `open_store`). None: no limit."""
    token = answer_limit.set(seconds)
    try:
        yield
    finally:
        answer_limit.reset(token)


def is_postgres(store: AsyncEngine | AsyncConnection) -> bool:
    return store.dialect.name == "postgresql"


def insert(tx: AsyncEngine | AsyncConnection, table: Table) -> Any:
    """An INSERT with ON CONFLICT; SQLAlchemy has one for each database, and only the one in use is loaded."""
    return import_module(f"sqlalchemy.dialects.{tx.dialect.name}").insert(table)
