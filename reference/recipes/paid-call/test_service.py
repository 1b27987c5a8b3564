"""python -m pytest test_service.py: a real worker, a provider that loses answers."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from patterns.engine import ensure_redis

ROOT = Path(__file__).parent
WORKER = ["worker.py"]
SUBMIT = ["submit.py"]
EXAMPLE = " --grams 1"  # without the key
# Keep in step with worker.py: the provider's answer, and what is stored.
ANSWER = '{"id": 7}'
STORED, ROW = "select key, answer from results", ("1", ANSWER)


class Provider(BaseHTTPRequestHandler):
    """Charges once per idempotency key, and loses the first answer about it."""

    asked: list[str] = []  # noqa: RUF012  shared by all requests

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Idempotency-Key"]
        self.asked.append(key)
        if self.asked.count(key) > 1:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ANSWER.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def env(tmp_path):
    redis = ensure_redis(tmp_path / "redis")
    provider = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=provider.serve_forever, daemon=True).start()
    yield {
        **os.environ,
        "REDIS_URL": redis.url,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'service.db'}",
        "PROVIDER_URL": f"http://127.0.0.1:{provider.server_port}",
        "PROVIDER_LONGEST": "0.5",
    }
    provider.shutdown()
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


def test_a_lost_answer_and_a_second_request_are_one_charge(env):
    submit(env, "1")
    submit(env, "1")
    work_until(env, lambda: rows(env, STORED))
    assert rows(env, STORED) == [ROW]
    assert len(Provider.asked) == 2
    assert len(set(Provider.asked)) == 1
