"""python -m pytest test_service.py: a real worker, a provider that loses answers."""

import json
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
EXAMPLE = " --phone text"  # without the key
# Keep in step with worker.py: the provider's answer, and what is stored.
ANSWER = '{"id": 7}'
STORED, ROW = "select key, answer from results", ("1", ANSWER)


class Provider(BaseHTTPRequestHandler):
    """Sends every request, loses the first answer, and can be looked up."""

    sent: list[str] = []  # noqa: RUF012  shared by all requests

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.sent.append(body["reference"])
        if len(self.sent) > 1:
            self.answer(200)

    def do_GET(self):
        self.answer(200 if any(sent in self.path for sent in self.sent) else 404)

    def answer(self, status):
        self.send_response(status)
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


def test_a_lost_answer_is_looked_up_and_not_sent_again(env):
    submit(env, "1")
    submit(env, "1")
    work_until(env, lambda: rows(env, STORED))
    assert rows(env, STORED) == [ROW]
    assert len(Provider.sent) == 1
