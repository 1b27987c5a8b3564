"""python -m pytest test_service.py: a slot every second, two workers, one of them killed."""

import os
import re
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
RUN_NOW = ["run_now.py"]
EXAMPLE = " --pages 1"  # without the key


@pytest.fixture
def env(tmp_path):
    redis = ensure_redis(tmp_path / "redis")
    yield {
        **os.environ,
        "REDIS_URL": redis.url,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'service.db'}",
        "CRON": "* * * * * *",
        "ZONE": "UTC",  # no summer time, which would repeat slots
    }
    redis.stop()


def rows(env, query):
    path = env["DATABASE_URL"].removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # no tables yet
            return []


def until(condition, log, *processes):
    ends = time.monotonic() + 120
    while not condition():
        assert all(process.poll() is None for process in processes), log.read_text()
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.1)


def test_many_slots_of_one_date_and_a_run_by_hand_take_effect_once(env, tmp_path):
    def slots():
        return sum(count for (count,) in rows(env, "select ticks from schedule_state"))

    def keys():
        return [key for (key,) in rows(env, "select key from results")]

    def by_hand(day):
        return re.findall(rf'\.{day}".*"outcome":"(\w+)"', log.read_text())

    words, kwargs = [sys.executable, *WORKER], {"cwd": ROOT, "env": env}
    log = tmp_path / "log"
    with log.open("w") as out:
        workers = [subprocess.Popen(words, **kwargs, stderr=out) for _ in range(2)]
    try:
        until(lambda: slots() >= 2, log, *workers)
        killed = workers.pop(0)
        killed.kill()
        killed.wait()
        seen = slots()
        until(lambda: slots() >= seen + 2 and keys(), log, *workers)
        days = keys()[0], "20200101"
        command = [sys.executable, *RUN_NOW, *days, *EXAMPLE.split()]
        subprocess.run(command, **kwargs, check=True)
        until(lambda: all(by_hand(day) for day in days), log, *workers)
        assert [*map(by_hand, days)] == [["duplicate"], ["completed"]], log.read_text()
        assert not rows(env, "select reason from dead_letters")
        assert len(keys()) == len(set(keys())) <= 3, "the third: midnight passed"
        workers[0].terminate()
        assert workers[0].wait(30) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
