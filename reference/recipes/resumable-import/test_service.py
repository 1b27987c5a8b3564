"""python -m pytest test_service.py: a real queue server, a real worker."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from patterns.engine import ensure_redis

ROOT = Path(__file__).parent
WORKER = ["worker.py"]
SUBMIT = ["submit.py"]
EXAMPLE = " --note text"  # without the key
ROWS = 500


@pytest.fixture
def env(tmp_path):
    redis = ensure_redis(tmp_path / "redis")
    yield {
        **os.environ,
        "REDIS_URL": redis.url,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'service.db'}",
        "UPLOADS": str(tmp_path / "uploads"),
        "BATCH": "1",
    }
    redis.stop()


def submit(env, *words):
    command = [sys.executable, *SUBMIT, *words, *EXAMPLE.split()]
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def rows(env, query):
    """What the worker has stored; nothing until it has made its tables."""
    try:
        path = env["DATABASE_URL"].removeprefix("sqlite:///")
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []


def work_until(env, done, stop):
    """Run a worker, signal `stop` to it when `done`; returns its exit code."""
    worker = subprocess.Popen([sys.executable, *WORKER], cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + 60
        while not done() and time.monotonic() < deadline:
            assert worker.poll() is None, "the worker ended, see above"
            time.sleep(0.01)
        worker.send_signal(stop)
        return worker.wait(30)
    finally:
        worker.kill()


def test_an_import_that_was_killed_goes_on_where_it_was(env, tmp_path):
    file = tmp_path / "upload.csv"
    good = "".join(f"row {n}\n" for n in range(ROWS))
    file.write_text(f"name\n{good}too,many\n")
    submit(env, str(file), "1")
    bad = "select line from imported where rejected is not null"
    count = "select count(*) from imported where rejected is null"
    work_until(env, lambda: rows(env, count) > [(ROWS // 10,)], signal.SIGKILL)
    assert rows(env, count) < [(ROWS,)], "killed too late to prove anything"
    code = work_until(env, lambda: rows(env, bad), signal.SIGTERM)
    assert code == 0
    assert rows(env, count.replace("*", "distinct line")) == [(ROWS,)]
    assert rows(env, bad) == [(ROWS + 2,)]
