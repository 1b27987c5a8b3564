"""Opens the store that `store` works with, an SQLite file or a PostgreSQL server, and makes its tables.

Promises
- `open_store` returns a store that answers, or says within `CONNECT_WAIT` seconds why it does not.
- When the server's machine gives no sign of life (packets swallowed, nothing reset), the network's own checks end a
  PostgreSQL connection after about `SILENCE` seconds. Inside `store.answers_within` every statement has its
  own limit as well: one not answered in time breaks its connection, which looks like a server that went away.
- No error shows a statement's values: they are people's names and addresses.
- `crowded` says at the start what would be timeouts under load: more jobs at once than connections can serve.
- `create_all` does not touch a foreign table that has one of our names: `TableTaken`.

When they do not hold
- Power loss on SQLite: `synchronous=NORMAL` (the default here) may lose the last commits, but never
  tears one. `begin(store, durable=True)` waits for the disk; `?synchronous=full` in the URL makes every commit do so.
- Outside `answers_within` a live proxy that forwards nothing passes those checks, and a statement waits forever. The
  limit cannot tell a slow statement from a silent server: give slow ones a longer limit.
- Behind PgBouncer in transaction mode say `?pooler=transaction`: no prepared statements, because the next transaction
  may get another connection, and no session settings, which PgBouncer refuses: put them (`_POSTGRES_SESSION`) on
  the role, `ALTER ROLE … SET lock_timeout = …`. There a relay polls instead of being woken.
"""

import asyncio
import logging
import os
import re
import select
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection, AsyncAdapt_aiosqlite_cursor
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import ArgumentError, InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, PoolResetState
from sqlalchemy.schema import CreateColumn
from sqlalchemy.util import await_
from sqlalchemy.util.concurrency import in_greenlet

from .failures import Permanent
from .store import ANSWER, LOCK_WAIT, Hop, StoreUnavailable, answer_limit, begin, hops, is_postgres, metadata, read

__all__ = ["SILENCE", "TableTaken", "WrongStoreUrl", "close", "create_all", "crowded", "open_store"]

CONNECT_WAIT = 5  # seconds until an unreachable server is an error
SILENCE = 10  # seconds
PING_AFTER = 1.0  # seconds of rest, after which a connection is asked whether it still works
JOBS_PER_CONNECTION = 50  # that end together, each with an effect of 200 ms: the last one has waited LOCK_WAIT
_CONNECTIONS = text(
    "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int, "
    "(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')"
)
_SCHEMA_LOCK = 0x51756575  # any number, the same in every process: serialises CREATE TABLE on PostgreSQL
_POSTGRES_SESSION = (
    f"-c lock_timeout={int(LOCK_WAIT * 1000)} "
    # A client frozen or unreachable inside a transaction must not keep its row locks: the others recover soon after
    # `ANSWER` only if these end about then.
    f"-c idle_in_transaction_session_timeout={int(ANSWER * 1000)} "
    # JIT compiles a statement whose cost it overrates on each run: half the time of a claim past a long backlog.
    "-c jit=off"
)
# All are needed: keepalives run only while nothing is in flight, the timeout only while something is.
_SOCKET_OPTIONS = {
    "keepalives": 1,
    "keepalives_idle": SILENCE // 2,
    "keepalives_interval": 1,
    "keepalives_count": SILENCE // 2,
    "tcp_user_timeout": SILENCE * 1000,
}


class WrongStoreUrl(ValueError):
    """The database URL cannot be used. Give `sqlite:///path.db` or `postgresql://user@host/name`."""


class TableTaken(Permanent):
    """The database has a table of this name that is not ours. Rename it, or ours in the module that declares it."""


def open_store(url: str) -> AsyncEngine:
    """Check that the database is there (blocks for at most `CONNECT_WAIT` s), then return its engine."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # the latter for a port that is no number
        raise WrongStoreUrl(f"{WrongStoreUrl.__doc__} It does not parse as a URL.") from error
    kind = parsed.drivername.split("+")[0]
    if kind == "sqlite":
        return _open_sqlite(parsed)
    if kind in ("postgresql", "postgres"):
        return _open_postgres(parsed)
    raise WrongStoreUrl(f"{WrongStoreUrl.__doc__} Got {parsed.render_as_string(hide_password=True)!r}.")


async def create_all(store: AsyncEngine) -> None:
    """Create the tables, columns and indexes that are missing. Safe when several processes start at once."""
    async with begin(store) as tx:
        if is_postgres(store):
            # CREATE TABLE IF NOT EXISTS still collides in pg_type when two sessions run it together.
            await tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
        await tx.run_sync(_create_missing)


def _create_missing(tx: Connection) -> None:
    metadata.create_all(tx)
    # It skips existing tables, and with them what a newer version of a pattern needs.
    known, ours = inspect(tx), list(metadata.tables)  # each table is some statements: look at no others
    columns = {(name, part["name"]) for (_, name), some in known.get_multi_columns(None, ours).items() for part in some}
    indexes = {(name, part["name"]) for (_, name), some in known.get_multi_indexes(None, ours).items() for part in some}
    for table in metadata.sorted_tables:
        for column in table.columns:
            if (table.name, column.name) not in columns:
                # No newer version adds such a column: existing rows would have no value for it.
                if not column.nullable and column.server_default is None:
                    raise TableTaken(f"{table.name} has no column {column.name}. {TableTaken.__doc__}")
                added = CreateColumn(column).compile(dialect=tx.dialect)
                tx.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {added}")
        for index in table.indexes:
            if (table.name, index.name) not in indexes:
                index.create(tx)


async def crowded(store: AsyncEngine, concurrency: int) -> str | None:
    """What to change if there are too few connections for this many jobs at once; None: there are enough.

    A job holds one only during its transactions, so jobs share them; and PostgreSQL must have them all free.
    """
    pool: Any = store.pool
    most = pool.size() + max(0, pool._max_overflow)
    if concurrency > most * JOBS_PER_CONNECTION:
        return (
            f"{concurrency} jobs at once share {most} connections to the database, and one that waits {LOCK_WAIT:g} s "
            f"for its turn fails: run at most {most * JOBS_PER_CONNECTION} per process, and more processes"
        )
    if not is_postgres(store):
        return None
    async with read(store) as connection:
        total, used = (await connection.execute(_CONNECTIONS)).one()
    if total - used < most:
        return (
            f"PostgreSQL has {total} connections and {used} are taken, this process opens up to {most}: raise its "
            "max_connections, start fewer processes, or put a pooler in between"
        )
    return None


async def close(store: AsyncEngine) -> None:
    await store.dispose()
    if hop := hops.pop(store.sync_engine, None):
        hop.threads.shutdown(wait=False)
        hop.reader.dispose()
        hop.writer.dispose()


def _open_sqlite(url: URL) -> AsyncEngine:
    if (url.database or ":memory:") == ":memory:":
        raise WrongStoreUrl(f"{WrongStoreUrl.__doc__} In memory every connection would have a database of its own.")
    path = str(Path(str(url.database)).absolute())  # now: after a chdir it would be another file
    options = {key: str(value).upper() for key, value in url.query.items()}
    synchronous = options.pop("SYNCHRONOUS", options.pop("synchronous", "NORMAL"))
    if options or synchronous not in ("NORMAL", "FULL"):
        raise WrongStoreUrl(f"{WrongStoreUrl.__doc__} The only option is ?synchronous=normal or full.")
    _switch_to_wal(path)
    # At DEBUG it writes every statement with its values.
    logging.getLogger("aiosqlite").setLevel(logging.INFO)
    # None: Python's sqlite3 opens no transactions of its own; _begin below is the only place that does.
    connect_args = {"isolation_level": None, "timeout": LOCK_WAIT}
    common: Any = {"hide_parameters": True, "pool_reset_on_return": None}  # see _end
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=path),
        connect_args=connect_args,
        pool_size=8,
        max_overflow=0,
        pool_timeout=LOCK_WAIT,
        **common,
    )
    event.listen(engine.sync_engine, "do_connect", _connect_sqlite)
    in_threads = {**connect_args, "check_same_thread": False}
    writer, reader = (
        create_engine(URL.create("sqlite", database=path), connect_args=in_threads, **common) for _ in range(2)
    )
    for each in (engine.sync_engine, reader, writer):
        _set_up_sqlite(each, synchronous)
    reader.update_execution_options(store_read=True)
    threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="store")
    hops[engine.sync_engine] = Hop(reader, writer, threads)
    return engine


def _set_up_sqlite(engine: Engine, synchronous: str) -> None:
    event.listen(engine, "handle_error", _hide_values)

    @event.listens_for(engine, "connect")
    def _connected(dbapi_connection: sqlite3.Connection, _record: object) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA synchronous={synchronous}")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "invalidate")
    def _cut_off(dbapi_connection: sqlite3.Connection, _record: object, _error: object) -> None:
        # A task was cancelled in the middle of a statement, and its connection is closed as it is. With an open
        # cursor SQLite keeps it as a zombie that holds the write lock, and every writer waits in vain.
        with suppress(Exception):
            dbapi_connection.rollback()

    @event.listens_for(engine, "reset")
    def _end(dbapi_connection: Any, _record: object, state: PoolResetState) -> None:
        # SQLite keeps the transaction of a refused COMMIT, and the write lock with it; for SQLAlchemy it has ended.
        if not state.terminate_only and getattr(dbapi_connection, "_connection", dbapi_connection).in_transaction:
            dbapi_connection.rollback()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        reading = options.get("store_read", False)
        level = "FULL" if options.get("store_durable") else synchronous
        if connection.info.get("synchronous", synchronous) != level:
            connection.exec_driver_sql(f"PRAGMA synchronous={level}")
            connection.info["synchronous"] = level
        if connection.info.get("reading", False) != reading:
            connection.exec_driver_sql(f"PRAGMA query_only={'ON' if reading else 'OFF'}")
            connection.info["reading"] = reading

    def do_begin(ours: Any) -> None:
        ours.cursor().execute("BEGIN" if ours.info.get("reading") else "BEGIN IMMEDIATE")

    vars(engine.dialect)["do_begin"] = do_begin


class _SqliteCursor(AsyncAdapt_aiosqlite_cursor):
    """A statement is one change of threads; with SQLAlchemy's cursor it is four."""

    __slots__ = ()
    _awaitable_cursor_close = False

    def _make_new_cursor(self, connection: Any) -> Any: ...

    def _aenter_cursor(self, cursor: Any) -> Any: ...

    def close(self) -> None:
        self._rows.clear()

    def execute(self, operation: Any, parameters: Any = None, how: str = "execute") -> None:
        def run(connection: sqlite3.Connection) -> tuple[sqlite3.Cursor, deque[Any]]:
            # Closed even if its caller has gone: see _cut_off.
            with closing(connection.cursor()) as cursor:
                getattr(cursor, how)(operation, parameters or ())
                return cursor, deque(cursor.fetchall() if cursor.description else ())

        here: Any = self._adapt_connection
        self._cursor, self._rows = here.in_its_thread(run)

    def executemany(self, operation: Any, seq_of_parameters: Any) -> None:
        self.execute(operation, seq_of_parameters, "executemany")


class _SqliteConnection(AsyncAdapt_aiosqlite_connection):
    __slots__ = ()
    _cursor_cls = _SqliteCursor

    def in_its_thread(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        driver: Any = self._connection
        try:
            # Without a greenlet it is that thread: see `finish`.
            return await_(driver._execute(work, driver._conn)) if in_greenlet() else work(driver._conn)
        except Exception as error:
            self._handle_exception(error)

    def commit(self) -> None:
        self.in_its_thread(sqlite3.Connection.commit)

    def rollback(self) -> None:
        if self._connection._connection:
            self.in_its_thread(sqlite3.Connection.rollback)

    async def finish(self, connection: Connection, work: Callable[[Connection], object]) -> None:
        """The last `work(connection)` of a transaction, with its COMMIT: one change of threads."""

        def in_its_thread() -> None:
            work(connection)
            connection.commit()

        driver: Any = self._connection
        done = asyncio.ensure_future(driver._execute(in_its_thread))
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            # This thread is about to close the connection: not while the other uses it.
            await asyncio.wait([done])
            raise


def _connect_sqlite(dialect: Any, _record: object, args: Any, options: Any) -> _SqliteConnection:
    made = dialect.connect(*args, **options)
    return _SqliteConnection(made.dbapi, made._connection)


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
    pooled = url.query.get("pooler") == "transaction"
    url = url.set(drivername="postgresql+psycopg").difference_update_query(["pooler"])
    if "connect_timeout" not in url.query:
        url = url.update_query_dict({"connect_timeout": str(CONNECT_WAIT)})
    try:
        psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False)).close()
    except psycopg.Error as error:
        raise StoreUnavailable(f"{StoreUnavailable.__doc__} Tried {where}: {error}") from error
    engine = create_async_engine(
        url,
        connect_args={
            **({} if pooled or "options" in url.query else {"options": _POSTGRES_SESSION}),
            **({"prepare_threshold": None} if pooled else {}),
            "async_creator_fn": _connect,
        },
        pool_size=8,
        max_overflow=8,
        pool_timeout=LOCK_WAIT,
        pool_reset_on_return=None,  # see _end
        hide_parameters=True,
    )
    event.listen(engine.sync_engine, "handle_error", _hide_values)
    idle = psycopg.pq.TransactionStatus.IDLE

    @event.listens_for(engine.sync_engine, "reset")
    def _end(dbapi_connection: Any, record: ConnectionPoolEntry, state: PoolResetState) -> None:
        if state.terminate_only:
            return
        record.info["rests"] = time.monotonic()
        if dbapi_connection.driver_connection.pgconn.transaction_status != idle:
            dbapi_connection.rollback()

    @event.listens_for(engine.sync_engine, "checkout")
    def _ask(dbapi_connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
        # After a server restart the first job should not pay with an attempt: its end can be read.
        rested = (now := time.monotonic()) - record.info.get("rests", now)
        doubtful = rested > PING_AFTER or _readable(dbapi_connection)
        if doubtful and not engine.dialect._do_ping_w_event(dbapi_connection):
            raise InvalidatePoolError

    return engine


def _readable(dbapi_connection: Any) -> bool:
    if dbapi_connection.closed:
        return True
    poll = select.poll()
    poll.register(dbapi_connection.driver_connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _connect(conninfo: str = "", **options: Any) -> Any:
    """A psycopg connection that notices silence; `options` and the address take precedence."""
    return await _connection_class().connect(conninfo, **{**_SOCKET_OPTIONS, **options})


@cache
def _connection_class() -> Any:
    import psycopg  # for PostgreSQL only

    class Connection(psycopg.AsyncConnection[Any]):
        async def wait(self, *args: Any, **kwargs: Any) -> Any:
            if (limit := answer_limit.get()) is None:
                return await super().wait(*args, **kwargs)
            alarm = asyncio.get_running_loop().call_later(limit, self._hang_up)
            try:
                return await super().wait(*args, **kwargs)
            finally:
                alarm.cancel()

        def _hang_up(self) -> None:
            # Not a cancellation: psycopg answers that by asking the silent server to cancel, and waits again.
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)

    return Connection


def _hide_values(context: ExceptionContext) -> None:
    """`hide_parameters` covers SQLAlchemy's words; PostgreSQL's own quote the row: "Key (email)=(ann@…) exists"."""
    error: Any = context.original_exception
    message = getattr(getattr(error, "diag", None), "message_primary", None)
    if type(error) is ValueError:  # a column type's own: "could not convert string to float: '…'"
        message = str(error)
    if not message:
        return
    # 22: wrong data, where even the first line quotes the value.
    if (getattr(error, "sqlstate", None) or "22").startswith("22"):
        message = re.sub(r"(['\"]).*\1", "…", message, flags=re.DOTALL)
    if context.sqlalchemy_exception is not None:
        wrapped = str(context.sqlalchemy_exception.args[0])
        context.sqlalchemy_exception.args = (wrapped.replace(str(error), message),)
    error.args = (message,)
