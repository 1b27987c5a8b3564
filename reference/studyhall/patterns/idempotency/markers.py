"""Work that may be delivered many times takes effect once.

Promise: for one (consumer, key) the effect is committed at most once, and every duplicate, now or later, gets
the first one's result. The marker is written in the SAME database transaction as the effect: a crash leaves
both or neither, so work is never marked done without being done, nor done without being marked.

The usual `SET NX` in Redis has such gaps. Before the work, a crash loses the work; with DEL in `except`, a
kill -9 still loses it, and an error after the charge charges twice. A key made of the job's id is worse: ids
are counters per queue, so another queue's job 7 gets another customer's result. Use a key of the business.

When it does not hold
- Effects outside the database (a charge, an e-mail) cannot join the transaction. Send `provider_key(key,
  step)` as the provider's idempotency key; without such a provider the effect is at-least-once.
- After `purge`, a late duplicate runs again. Keep markers longer than anything can come back: the longest
  retry schedule, failed jobs and dead letters that may be replayed, events that a bus or an outbox keeps.
- `seen` followed by `record` lets two concurrent duplicates both do the work in between. That is right for
  work whose only effect is its result (the first one recorded stands for both). For any other: `once`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Engine, Float, Index, String, Table, Text, delete, event, select, tuple_, update
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.failures import KeyReused, Transient
from ..core.group_commit import GroupCommit
from ..core.plain_json import NotJson, dumps, fingerprint, loads
from ..core.store import begin, hops, in_one_hop, is_postgres, metadata, read

__all__ = ["Inbox", "KeyReused", "NotJson", "Stored", "fingerprint", "inbox", "purge", "result_of"]

T = TypeVar("T")
SLOW_LOOK, NO_LOOKS = 0.05, 10.0  # seconds: after a look that took the first, none for the second

inbox = Table(
    "inbox",
    metadata,
    Column("consumer", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("result", Text),  # JSON; NULL only inside the transaction that runs the effect
    Column("at", Float, nullable=False),  # seconds since 1970, for purge
    Index("inbox_at", "at"),
    sqlite_with_rowid=False,
)

# Plain SQL: every job needs both, and building them for each batch took longer than running them.
_CLAIM = """INSERT INTO inbox (consumer, key, fingerprint, result, at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING"""
_LOOK_UP = "SELECT key, fingerprint, result, at FROM inbox WHERE consumer = ? AND key IN (?)"
# One statement for any number of rows, so that psycopg prepares it: its `executemany` waits for each row.
_CLAIM_ALL = """INSERT INTO inbox (consumer, key, fingerprint, result, at)
SELECT %s, key, fingerprint, result, %s FROM unnest(%s::text[], %s::text[], %s::text[]) AS new(key, fingerprint, result)
ON CONFLICT DO NOTHING"""
_LOOK_UP_ALL = "SELECT key, fingerprint, result, at FROM inbox WHERE consumer = %s AND key = ANY(%s)"

# The errors that one bad key or result can cause, SQLAlchemy's and the driver's.
_POISON = (
    *(DataError, IntegrityError, ProgrammingError, ValueError, OverflowError),
    *(sqlite3.DataError, sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError),
)


class _Row(NamedTuple):
    key: str
    fingerprint: str
    result: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Stored:
    """What an earlier run left: its result, and when (seconds since 1970)."""

    result: Any
    at: float


class _Entry(NamedTuple):
    key: str
    fingerprint: str
    result: str = "null"


def result_of(store: AsyncEngine) -> Callable[[Any], Awaitable[Stored | None]]:
    """For `wait_for_result`: what a job's marker says after the job has left Redis."""

    async def stored(ref: Any) -> Stored | None:
        # The second is from `plain`, whose keys belong to one queue.
        kinds = inbox.c.consumer.in_([ref.name, f"{ref.queue}/{ref.name}"])
        query = select(inbox.c.result, inbox.c.at).where(kinds, inbox.c.key == ref.key)
        async with read(store) as connection:
            row = (await connection.execute(query)).first()
        return None if row is None or row.result is None else Stored(loads(row.result), row.at)

    return stored


async def purge(store: AsyncEngine, older_than: float) -> int:
    """Forget every consumer's markers older than this many seconds."""
    async with read(store) as connection:
        consumers = (await connection.scalars(select(inbox.c.consumer).distinct())).all()
    return sum([await Inbox(store, consumer).purge(older_than) for consumer in consumers])


class Inbox:
    """The markers of one consumer. Two consumers of the same event each have their own."""

    def __init__(self, store: AsyncEngine, consumer: str) -> None:
        self.store = store
        self._consumer = consumer
        self._postgres = is_postgres(store)
        self._look = _look_of(store.sync_engine)
        self._look_ups = GroupCommit(self._look_up_all, poison=_POISON)
        self._records = GroupCommit(self._record_all, poison=_POISON)

    async def once(self, key: str, fingerprint: str, effect: Callable[[AsyncConnection], Awaitable[Any]]) -> Any:
        """Run `effect(tx)` unless it was done before; either way return the result of the run that counted.

        An effect that raises leaves nothing: the next delivery runs it again. Keep slow work out of it, it
        holds a transaction open (and on SQLite the only writer).
        """
        async with begin(self.store) as tx:
            # The marker goes first. A concurrent duplicate waits here for our commit (PostgreSQL: on the
            # unfinished row, SQLite: for the write turn) and then finds the row.
            if not await tx.run_sync(self._claim, [_Entry(key, fingerprint)]):
                stored = await tx.run_sync(self._stored, [key])
                return _same_payload(stored.get(key), key, fingerprint).result
            result = dumps(await effect(tx))
            marker = (inbox.c.consumer == self._consumer) & (inbox.c.key == key)
            await tx.execute(update(inbox).where(marker).values(result=result))
        return loads(result)

    async def seen(self, key: str, fingerprint: str) -> Stored | None:
        """What was stored for this key, for a look before slow work. Concurrent callers share one SELECT."""
        return await self._look_ups.put(_Entry(key, fingerprint))

    async def record(self, key: str, fingerprint: str, result: Any) -> Any:
        """Store the result of work that has no other effect; return the one that stands (the first stored).

        Callers that wait at the same time share one commit: 50 of them cost one, not 50.
        """
        return await self._records.put(_Entry(key, fingerprint, dumps(result)))

    async def purge(self, older_than: float, *, batch: int = 1000) -> int:
        """Forget markers older than this many seconds; `batch` rows at a time, so that writers get their turn."""
        aged = (inbox.c.consumer == self._consumer) & (inbox.c.at < time.time() - older_than)
        oldest = select(inbox.c.consumer, inbox.c.key).where(aged).order_by(inbox.c.at).limit(batch)
        deleted = 0
        while True:
            async with begin(self.store) as tx:
                done = await tx.execute(delete(inbox).where(tuple_(inbox.c.consumer, inbox.c.key).in_(oldest)))
            deleted += done.rowcount
            if done.rowcount < batch:
                return deleted
            await asyncio.sleep(0)

    async def _look_up_all(self, entries: Sequence[_Entry]) -> list[Stored | Exception | None]:
        keys = [entry.key for entry in entries]
        stored = self._look(lambda database: self._stored(database, keys)) if self._look else None
        if stored is None:
            stored = await self._hop(lambda connection: self._stored(connection, keys), write=False)
        return [_check(stored.get(entry.key), entry) if entry.key in stored else None for entry in entries]

    async def _record_all(self, entries: Sequence[_Entry]) -> list[Any]:
        def work(tx: _Runs) -> dict[str, _Row] | None:
            if self._claim(tx, entries) == len(entries):
                return None
            return self._stored(tx, [entry.key for entry in entries])

        stored = await self._hop(work, write=True)
        if stored is None:
            return [loads(entry.result) for entry in entries]
        checked = [_check(stored.get(entry.key), entry) for entry in entries]
        return [each.result if isinstance(each, Stored) else each for each in checked]

    async def _hop(self, work: Callable[[_Runs], T], *, write: bool) -> T:
        return await in_one_hop(self.store, work, write=write, transact=_transact)

    def _claim(self, tx: _Runs, entries: Sequence[_Entry]) -> int:
        """Insert the missing markers; returns how many."""
        now = time.time()
        # One order in all processes: batches that overlap in another order deadlock on PostgreSQL.
        in_order = sorted(entries, key=itemgetter(0))
        if self._postgres:
            columns = [[getattr(e, name) for e in in_order] for name in ("key", "fingerprint", "result")]
            return int(tx.exec_driver_sql(_CLAIM_ALL, (self._consumer, now, *columns)).rowcount)
        rows = [(self._consumer, *entry, now) for entry in in_order]
        return int(tx.exec_driver_sql(_CLAIM, rows).rowcount)

    def _stored(self, connection: _Runs, keys: Sequence[str]) -> dict[str, _Row]:
        if self._postgres:
            rows = connection.exec_driver_sql(_LOOK_UP_ALL, (self._consumer, list(keys)))
        else:
            look_up = _LOOK_UP.replace("(?)", f"({', '.join('?' * len(keys))})")
            rows = connection.exec_driver_sql(look_up, (self._consumer, *keys))
        return {row[0]: _Row(*row) for row in rows}


def _same_payload(row: _Row | None, key: str, fingerprint: str) -> Stored:
    if row is None:
        raise Transient("The marker was purged while its duplicate was being answered: try again.")
    if row.fingerprint != fingerprint:
        raise KeyReused(f"{KeyReused.__doc__} Key: {key[:120]!r}.")
    return Stored(loads(row.result or "null"), row.at)


def _check(row: _Row | None, entry: _Entry) -> Stored | Exception:
    try:
        return _same_payload(row, entry.key, entry.fingerprint)
    except (KeyReused, Transient) as error:
        return error


class _Runs(Protocol):
    """What is used of SQLAlchemy's Connection and SQLite's driver; a list of rows means once for each."""

    def exec_driver_sql(self, statement: str, parameters: Any) -> Any: ...


class _Driver:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def exec_driver_sql(self, statement: str, parameters: Any) -> sqlite3.Cursor:
        many = isinstance(parameters, list)
        return (self._database.executemany if many else self._database.execute)(statement, parameters)


class _Look:
    """Reads an SQLite file in the event loop's own thread: a change of threads takes longer than the SELECT, and its
    readers wait for nobody. None, where this one would (a locked file, a cold disk): ask in another thread."""

    def __init__(self, path: str) -> None:
        self._path, self._not_before = path, 0.0
        self._database: sqlite3.Connection | None = None

    def __call__(self, work: Callable[[_Runs], T]) -> T | None:
        if (began := time.monotonic()) < self._not_before:
            return None
        try:
            if self._database is None:
                # Without patience: whoever keeps the file locked must not stop the loop.
                self._database = sqlite3.connect(self._path, 0, isolation_level=None, check_same_thread=False)
                self._database.execute("PRAGMA query_only=ON")
            return work(_Driver(self._database))
        except sqlite3.Error:  # the usual way says what is wrong
            self.close()
            return None
        finally:
            if time.monotonic() - began > SLOW_LOOK:
                self._not_before = time.monotonic() + NO_LOOKS

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None

    def end(self, _engine: Engine) -> None:
        self._not_before = float("inf")
        self.close()


_looks: WeakKeyDictionary[Engine, _Look] = WeakKeyDictionary()


def _look_of(engine: Engine) -> _Look | None:
    if (hop := hops.get(engine)) is not None and engine not in _looks:
        _looks[engine] = _Look(str(hop.reader.url.database))
        event.listen(engine, "engine_disposed", _looks[engine].end)
    return _looks.get(engine)


def _transact(engine: Engine, work: Callable[[_Runs], T]) -> T:
    """On SQLite without SQLAlchemy in between: 61 us per job became 45."""
    pooled = engine.raw_connection()
    try:
        database: Any = pooled.driver_connection
        database.execute("BEGIN" if engine.get_execution_options().get("store_read") else "BEGIN IMMEDIATE")
        done = work(_Driver(database))
        database.commit()
        return done
    finally:
        pooled.close()  # rolls back what was not committed
