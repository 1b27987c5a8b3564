"""The ledger's table in SQL that SQLite and PostgreSQL share; `dbapi` and `store` run it. Imports no driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .ledger import Call, State

__all__ = ["CREATE", "Execute", "purge", "read", "unclear", "write"]

CREATE = """CREATE TABLE IF NOT EXISTS outside_calls (
provider VARCHAR(100) NOT NULL, key TEXT NOT NULL, state VARCHAR(20) NOT NULL, version INTEGER NOT NULL,
tries INTEGER NOT NULL, first DOUBLE PRECISION NOT NULL, since DOUBLE PRECISION NOT NULL, result TEXT,
reason TEXT NOT NULL, PRIMARY KEY (provider, key))"""
_READ = """SELECT CLOCK, provider, key, state, version, tries, first, since, result, reason
FROM (SELECT 1 AS one) AS always LEFT JOIN outside_calls ON provider = ? AND key = ?"""
_INSERT = """INSERT INTO outside_calls (state, version, tries, first, since, result, reason, provider, key)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_UPDATE = """UPDATE outside_calls SET state = ?, version = ?, tries = ?, first = ?, since = ?, result = ?, reason = ?
WHERE provider = ? AND key = ? AND version = ?"""
_UNCLEAR = """SELECT provider, key, state, version, tries, first, since, result, reason FROM outside_calls
WHERE provider = ? AND state = 'unclear' ORDER BY since LIMIT ?"""
_PURGE = """DELETE FROM outside_calls
WHERE provider = ? AND state IN ('done', 'refused') AND since < CLOCK - ?"""
_CLOCK = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "EXTRACT(EPOCH FROM clock_timestamp())",
}

Execute = Callable[[str, Sequence[Any]], Any]  # a statement with `?` and its values; returns a cursor


def read(execute: Execute, dialect: str, provider: str, key: str) -> Call:
    """One row, found or not: it brings the time along."""
    now, *row = execute(_READ.replace("CLOCK", _CLOCK[dialect]), (provider, key)).fetchone()
    return Call(provider, key, now=float(now)) if row[0] is None else _call(row, float(now))


def write(execute: Execute, call: Call) -> bool:
    values = [str(call.state), call.version, call.tries, call.first, call.since, call.result, call.reason]
    values += [call.provider, call.key]
    new = call.version == 1
    done = execute(_INSERT, values) if new else execute(_UPDATE, [*values, call.version - 1])
    return int(done.rowcount) == 1


def unclear(execute: Execute, provider: str, limit: int) -> list[Call]:
    return [_call(row) for row in execute(_UNCLEAR, (provider, limit)).fetchall()]


def purge(execute: Execute, dialect: str, provider: str, older_than: float) -> int:
    return int(execute(_PURGE.replace("CLOCK", _CLOCK[dialect]), (provider, older_than)).rowcount)


def _call(row: Sequence[Any], now: float = 0.0) -> Call:
    provider, key, state, version, tries, first, since, result, reason = row
    return Call(provider, key, State(state), version, tries, first, since, result, reason, now)
