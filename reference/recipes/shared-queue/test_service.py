"""python -m pytest test_service.py: a real queue server, a real worker."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from bullmq import Queue

from jobs import QUEUE
from patterns.core.connections import producer_client
from patterns.engine import ensure_redis

ROOT = Path(__file__).parent
WORKER = ["worker.py"]
SUBMIT = ["submit.py"]
EXAMPLE = " --grams 1"  # without the key


@pytest.fixture
def env(tmp_path):
    redis = ensure_redis(tmp_path / "redis")
    yield {
        **os.environ,
        "REDIS_URL": redis.url,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'service.db'}",
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


def work_until(env, done):
    worker = subprocess.Popen([sys.executable, *WORKER], cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + 60
        while not done():
            assert worker.poll() is None, "the worker ended, see above"
            assert time.monotonic() < deadline, "not done within 60 s"
            time.sleep(0.05)
        worker.terminate()
        assert worker.wait(30) == 0
    finally:
        worker.kill()


def test_the_same_request_under_two_job_ids_takes_effect_once(env):
    submit(env, "1", "2")
    submit(env, "1")
    work_until(env, lambda: len(rows(env, "select * from results")) == 2)
    assert rows(env, "select key from results order by 1") == [("1",), ("2",)]


def test_a_job_that_nobody_can_read_is_a_dead_letter_with_a_reason(env):
    asyncio.run(add(env, {"nothing": "of use"}))
    dead = "select reason from dead_letters"
    work_until(env, lambda: rows(env, dead))
    assert "MalformedPayload" in rows(env, dead)[0][0]


async def add(env, data):
    redis = producer_client(env["REDIS_URL"])
    queue = Queue(QUEUE, {"connection": redis})
    await queue.add("task", data, {"removeOnFail": True})
    await redis.aclose()
