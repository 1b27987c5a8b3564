"""`once` on plain connections: the same marker as the async inbox, in the caller's transaction or one of its own."""

import json
import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from harness.missing import missing
from harness.processes import ROOT
from studyhall.patterns.core.store import begin
from studyhall.patterns.idempotency import Inbox, fingerprint
from studyhall.patterns.sync_inbox import KeyReused, create, once


def sqlite(path, **options):
    return lambda: sqlite3.connect(path / "shop.db", timeout=30, **options)


@pytest.fixture(
    params=[
        "sqlite",
        "sqlite-autocommit",
        *(pytest.param(name, marks=pytest.mark.needs_postgres) for name in ("postgres", "postgres-autocommit")),
    ]
)
def connect(request, tmp_path):
    match request.param:
        case "sqlite":
            made = sqlite(tmp_path)
        case "sqlite-autocommit":
            made = sqlite(tmp_path, isolation_level=None)
        case name:
            url = request.getfixturevalue("postgres_url")
            made = lambda: psycopg.connect(url, autocommit=name.endswith("autocommit"))  # noqa: E731
    with closing(made()) as connection:
        create(connection)
        create(connection)
        run(connection, "CREATE TABLE mails (sent_to TEXT)")
        connection.commit()
    return made


def run(connection, statement):
    cursor = connection.cursor()
    cursor.execute(statement)
    return cursor


def mail(connection):
    run(connection, "INSERT INTO mails VALUES ('ann')")
    return {"sent": "to ann"}


def mails(connect):
    with closing(connect()) as connection:
        return int(run(connection, "SELECT count(*) FROM mails").fetchone()[0])


def test_duplicates_make_one_effect_and_get_its_result(connect):
    for _ in range(3):
        with closing(connect()) as connection:
            assert once(connection, "mails", "order-1", {"to": "ann"}, mail) == {"sent": "to ann"}
    assert mails(connect) == 1, "committed without a word from the caller"
    with closing(connect()) as connection:
        assert once(connection, "other", "order-1", {"to": "ann"}, mail)
        with pytest.raises(KeyReused):
            once(connection, "mails", "order-1", {"to": "bob"}, mail)
    assert mails(connect) == 2


def test_an_effect_that_raises_leaves_nothing_and_runs_again(connect):
    def broken(connection):
        mail(connection)
        raise OSError("disk full")

    with closing(connect()) as connection:
        with pytest.raises(OSError, match="disk full"):
            once(connection, "mails", "order-1", 1, broken)
        assert once(connection, "mails", "order-1", 1, mail) == {"sent": "to ann"}
    assert mails(connect) == 1


def test_concurrent_duplicates_make_one_effect(connect):
    def deliver(_):
        with closing(connect()) as connection:
            return once(connection, "mails", "order-1", 1, mail)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(deliver, range(40))) == [{"sent": "to ann"}] * 40
    assert mails(connect) == 1


def test_a_transaction_of_the_caller_is_joined_and_decides(connect):
    with closing(connect()) as connection:
        run(connection, "BEGIN")
        assert once(connection, "mails", "order-1", 1, mail) == {"sent": "to ann"}
        connection.rollback()
    assert mails(connect) == 0

    def broken(connection):
        mail(connection)
        raise OSError("disk full")

    with closing(connect()) as connection:
        run(connection, "BEGIN")
        with pytest.raises(OSError, match="disk full"):
            once(connection, "mails", "order-1", 1, broken)
        once(connection, "mails", "order-2", 1, mail)
        connection.commit()  # the caller goes on: the failed one must not count as done
        assert once(connection, "mails", "order-1", 1, mail) == {"sent": "to ann"}
    assert mails(connect) == 2


async def test_the_async_inbox_and_plain_connections_share_their_markers(store, store_url):
    payload, runs = {"b": 1, "a": [None, "é"]}, []

    def plainly(connection):
        runs.append("plain")
        return "of the plain one"

    async def effect(tx):
        runs.append("async")
        await tx.execute(text("SELECT 1"))
        return "of the async one"

    path = store_url.removeprefix("sqlite:///")
    plain = sqlite3.connect(path) if store_url.startswith("sqlite") else psycopg.connect(store_url)
    inbox = Inbox(store, "mails")
    with closing(plain) as connection:
        create(connection)  # is there already
        assert once(connection, "mails", "a", payload, plainly) == "of the plain one"
        assert await inbox.once("a", fingerprint(payload), effect) == "of the plain one"
        assert await inbox.once("b", fingerprint(payload), effect) == "of the async one"
        assert once(connection, "mails", "b", payload, plainly) == "of the async one"
    assert runs == ["plain", "async"]
    async with begin(store) as tx:
        assert (await tx.execute(text("SELECT count(*) FROM inbox"))).scalar_one() == 2


@pytest.mark.full
def test_inside_djangos_atomic_blocks(tmp_path):
    """In an environment of its own: this repository does not need Django."""
    uv, home = Path(sys.executable).with_name("uv"), tmp_path / "venv"
    for command in ([uv, "venv", "-q", home], [uv, "pip", "install", "-q", "--python", home, "django>=5.2"]):
        if subprocess.run(command, check=False).returncode:
            missing("Django", "give uv a package registry in reach")
    done = subprocess.run(
        [home / "bin" / "python", Path(__file__).parent / "programs" / "django_shop.py", tmp_path / "django.db"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "reference")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "mails": 1,
        "results": ["sent", "sent"],
        "rolled back": 0,
        "outside atomic": "Permanent",
        "ledger after a rollback": "done",
        "calls": 1,
    }
