"""`queuesmith add celery-inbox | sqs-jobs | bullmq-ts | asynq`."""

import importlib
import os
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import psycopg
import pytest

from harness.waiting import until_sync
from queuesmith import cli, stacks
from queuesmith.prove.card import as_text
from queuesmith.prove.run import Options, prove
from queuesmith.prove.spec import load
from queuesmith.stacks import SERVICES, STACKS
from studyhall.patterns.core.errors import Permanent, RateLimited, Snooze
from studyhall.patterns.sync_inbox import execute, transaction


@pytest.mark.parametrize("name", ["bullmq-ts", "asynq"])
def test_the_modules_arrive_as_they_are(name, tmp_path):
    assert cli.main(["add", name, "--into", str(tmp_path)]) == 0
    for file in STACKS[name].files:
        assert (tmp_path / file).read_text() == (SERVICES / STACKS[name].folder / file).read_text()


def test_an_edited_module_is_not_overwritten(tmp_path):
    (tmp_path / "inbox.ts").write_text("// mine")
    with pytest.raises(stacks.Refused, match=r"inbox.ts"):
        stacks.copy(STACKS["bullmq-ts"], tmp_path)
    assert not (tmp_path / "reliable.ts").exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [("celery-inbox", "celery_jobs.py"), ("sqs-jobs", "sqs_jobs.py"), ("table-worker", "table_worker.py")],
)
def test_a_python_stack_gets_the_patterns_that_its_module_imports(name, file, tmp_path, monkeypatch):
    package = tmp_path / "src" / "app"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["add", name, "--into", "src/app", "--no-tests"]) == 0
    text = (package / "patterns" / file).read_text()
    assert "studyhall" not in text
    for module in ("sync_inbox.py", "core/errors.py", "outside_call/sync.py", "outside_call/dbapi.py"):
        assert (package / "patterns" / module).is_file()


FAULTS = ("kill-at-effect", "kill-at-commit", "term", "twice", "refused", "redis-restart")


@pytest.mark.slow
def test_a_table_as_the_queue_survives_kills_and_redis_is_not_counted_where_nobody_uses_it(monkeypatch):
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "0.3")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    card = prove(load(SERVICES / "table" / "prove.toml"), Options(seed=3, only=FAULTS))
    rows = {row.fault: row for row in card.rows}
    redis = rows.pop("redis-restart")
    assert (redis.verdict, redis.measured) == ("not run", "the service does not use Redis"), as_text(card)
    assert {row.verdict for row in rows.values()} == {"held"}, as_text(card)
    assert rows.keys() >= {*FAULTS} - {"redis-restart"}
    assert card.server == "no Redis"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.needs_postgres)])
def connect(request, tmp_path):
    if request.param == "sqlite":
        return lambda: sqlite3.connect(tmp_path / "shop.db", timeout=30)
    url = request.getfixturevalue("postgres_url")
    return lambda: psycopg.connect(url)


def test_a_row_of_the_table_has_one_holder_and_the_error_decides(connect, monkeypatch):
    monkeypatch.syspath_prepend(SERVICES / "table")
    table = importlib.import_module("table_worker")
    with closing(connect()) as db, closing(connect()) as other:
        table.create(db)

        def add(key):
            with transaction(db):
                assert table.put(db, "k", key)
                assert not table.put(db, "k", key)

        def state(key):
            with transaction(db):
                row = execute(db, "SELECT state, tries, reason, due FROM table_jobs WHERE key = ?", key).fetchone()
            return (*row[:3], row[3] - time.time())

        def overtaken(_):
            # its lease is over at once, so another worker takes and ends it meanwhile
            until_sync(lambda: table._next(other, "k", lambda key: None, 60, 5), what="the lease is over")
            return lambda db: execute(db, "INSERT INTO table_jobs VALUES ('x', 'x', '', 0, 0, '')")

        add("a")
        assert table._next(db, "k", overtaken, -1, 5)
        assert state("a")[:2] == ("done", 2)
        with transaction(db):
            assert not execute(db, "SELECT 1 FROM table_jobs WHERE kind = 'x'").fetchall()
        for error, expected in (
            (Permanent("no"), ("failed", 1, "no")),
            (Snooze(50), ("open", 0, "")),
            (RateLimited(retry_after=50), ("open", 0, "")),
            (ValueError("odd"), ("open", 1, "odd")),
        ):
            key = repr(error)
            add(key)
            assert table._next(db, "k", Mock(side_effect=error), 60, 5)
            assert state(key)[:3] == expected
            if expected[1] == 0:
                assert 30 < state(key)[3] < 51
            with transaction(db):  # of a clock that was an hour ahead: due
                execute(db, "UPDATE table_jobs SET due = due + 4000, tries = 5 WHERE key = ?", key)
            assert table._next(db, "k", Mock(), 60, 5) == (expected[0] == "open")
            assert state(key)[0] == "failed"
