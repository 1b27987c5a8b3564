"""The ledger in the store of `core.store`: the table comes with `create_all(store)`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, Double, Index, Integer, String, Table, Text
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.store import in_one_hop, is_postgres, metadata
from . import dbapi as sql
from .ledger import Call

__all__ = ["StoreLedger", "outside_calls"]

T = TypeVar("T")

outside_calls = Table(
    "outside_calls",
    metadata,
    Column("provider", String(100), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("state", String(20), nullable=False),
    Column("version", Integer, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("first", Double, nullable=False),
    Column("since", Double, nullable=False),
    Column("result", Text),
    Column("reason", Text, nullable=False),
    Index("outside_calls_state", "provider", "state", "since"),
)


class StoreLedger:
    def __init__(self, store: AsyncEngine) -> None:
        self._store = store
        self._dialect, self._mark = ("postgresql", "%s") if is_postgres(store) else ("sqlite", "?")

    async def read(self, provider: str, key: str) -> Call:
        return await self._run(lambda execute: sql.read(execute, self._dialect, provider, key), write=False)

    async def write(self, call: Call) -> bool:
        return await self._run(lambda execute: sql.write(execute, call))

    async def unclear(self, provider: str, limit: int) -> list[Call]:
        return await self._run(lambda execute: sql.unclear(execute, provider, limit), write=False)

    async def purge(self, provider: str, older_than: float) -> int:
        return await self._run(lambda execute: sql.purge(execute, self._dialect, provider, older_than))

    async def _run(self, work: Callable[[sql.Execute], T], *, write: bool = True) -> T:
        def in_transaction(connection: Connection) -> T:
            def execute(statement: str, values: Sequence[Any]) -> Any:
                return connection.exec_driver_sql(statement.replace("?", self._mark), tuple(values))

            return work(execute)

        return await in_one_hop(self._store, in_transaction, write=write)
