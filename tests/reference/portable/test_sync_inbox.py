"""Without an event loop: one effect per key, and every duplicate gets its result."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from studyhall.patterns.core.errors import KeyReused
from studyhall.patterns.sync_inbox import create, once


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(tmp_path / "mails.db")) as opened:
        opened.execute("create table sent (order_id text)")
        create(opened)
        yield opened


def send(connection: sqlite3.Connection) -> str:
    connection.execute("insert into sent values ('o-7')")
    return "sent"


def test_a_duplicate_gets_the_first_result_and_another_payload_is_refused(connection: sqlite3.Connection):
    for _ in range(3):
        assert once(connection, "mails", "o-7", {"to": "ann"}, send) == "sent"
    assert connection.execute("select count(*) from sent").fetchone() == (1,)
    with pytest.raises(KeyReused):
        once(connection, "mails", "o-7", {"to": "bob"}, send)


def test_an_effect_that_raises_leaves_nothing(connection: sqlite3.Connection):
    def breaks(connection: sqlite3.Connection) -> None:
        send(connection)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        once(connection, "mails", "o-7", {}, breaks)
    assert connection.execute("select count(*) from sent").fetchone() == (0,)
    assert once(connection, "mails", "o-7", {}, send) == "sent"
