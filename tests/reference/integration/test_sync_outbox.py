"""The outbox on plain connections: the same table and the same relay as the async one."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import select

from studyhall.patterns import outbox
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.outbox.table import outbox as table
from studyhall.patterns.sync_outbox import add, create

Connect = Callable[..., Any]
STORES = ["sqlite", pytest.param("postgres", marks=pytest.mark.needs_postgres)]


class Bus:
    def __init__(self):
        self.published: list[str] = []

    async def publish(self, events):
        self.published += [event.id for event in events]
        return [None for _ in events]


def booked(number):
    return Event(
        id=f"booking.{number}", type="booking.made.v1", source="/clinic", subject=f"room-{number % 2}", data={}
    )


@pytest.fixture(params=STORES)
def where(request, tmp_path):
    """How to connect, and the same database for the relay."""
    if request.param == "sqlite":
        path = tmp_path / "clinic.db"

        def connect(autocommit=False):
            return sqlite3.connect(path, timeout=30, **({"isolation_level": None} if autocommit else {}))

        return connect, f"sqlite:///{path}"
    url = request.getfixturevalue("postgres_url")
    return (lambda autocommit=False: psycopg.connect(url, autocommit=autocommit)), url


@pytest.mark.parametrize("created_by", ["create", "create_all"])
async def test_what_commits_is_published_and_what_rolls_back_never_is(where, created_by):
    connect, url = where
    store, bus = open_store(url), Bus()
    try:
        if created_by == "create_all":
            await create_all(store)
        with closing(connect()) as connection:
            create(connection)  # adds nothing to the other's table
            connection.execute("CREATE TABLE bookings (id INTEGER PRIMARY KEY)")
            connection.commit()
            for number in range(10):
                connection.execute(f"INSERT INTO bookings VALUES ({number})")
                assert add(connection, booked(number), to=["calendar", "bus"]) == 2
                if number % 3 == 0:
                    connection.rollback()
                    continue
                connection.commit()
            assert add(connection, booked(1)) == 0, "the id is there"
            connection.commit()
        async with begin(store) as tx:  # beside it, the async way
            await outbox.add(tx, booked(99))
        relay = Relay(store, bus)
        while await relay.run_once():
            pass
        async with read(store) as connection:
            waiting = await connection.execute(select(table.c.event_id).where(table.c.published_at.is_(None)))
            rows = sorted(waiting.scalars())
    finally:
        await close(store)
    kept = [f"booking.{number}" for number in (1, 2, 4, 5, 7, 8)]
    assert sorted(bus.published) == sorted([*kept, "booking.99"])
    assert rows == kept, "those for the calendar wait for a relay of its own"


def test_an_event_outside_a_transaction_is_refused(where):
    connect, _ = where
    with closing(connect()) as connection:
        create(connection)
    with closing(connect(autocommit=True)) as connection:
        with pytest.raises(Permanent, match="there is none on this connection"):
            add(connection, booked(1))
        connection.execute("BEGIN")
        assert add(connection, booked(1)) == 1
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")
        assert add(connection, booked(1)) == 1, "the first was rolled back"
        connection.execute("COMMIT")
