"""python -m pytest test_service.py: taken without Redis, done once."""

import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import pytest

from jobs import KEY
from patterns.engine import ensure_redis
from patterns.signed_http import sign

ROOT = Path(__file__).parent
API = ["api.py"]
WORKER = ["worker.py"]
SEND = ["send.py"]
EXAMPLE = " --amount 1"  # without the key


def until(condition, *processes):
    ends = time.monotonic() + 120
    while not condition():
        assert all(process.poll() is None for process in processes), "ended, see above"
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.1)


def post(url, body=None, signature=""):
    try:
        request = urllib.request.Request(url, body, {"Signature": signature})
        return urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None  # not listening yet


def free_port():
    """Below the ports of outgoing connections: one of those could take it before the server does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture
def service(tmp_path):
    """Starts its processes, and ends them."""
    port = free_port()
    running = []

    class Service:
        url = f"http://127.0.0.1:{port}"
        env = {  # noqa: RUF012
            **os.environ,
            "REDIS_URL": "redis://127.0.0.1:1",
            "DATABASE_URL": f"sqlite:///{tmp_path / 'service.db'}",
            "SIGNING_SECRETS": "old new",
            "WEBHOOK_URL": f"{url}/webhook",
        }

        def start(self, *command):
            words = [sys.executable, *command]
            running.append(subprocess.Popen(words, cwd=ROOT, env=self.env))
            return running[-1]

        def send(self, *keys):
            command = [sys.executable, *SEND, *keys, *EXAMPLE.split()]
            subprocess.run(command, cwd=ROOT, env=self.env, check=True)

        def results(self):
            with closing(sqlite3.connect(tmp_path / "service.db")) as connection:
                try:
                    rows = connection.execute("select key from results").fetchall()
                except sqlite3.OperationalError:  # no table yet
                    return []
                return sorted(key for (key,) in rows)

    service = Service()
    try:
        api = service.start(*API, str(port))
        until(lambda: post(f"{service.url}/healthz") == 200, api)
        yield service
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_what_is_answered_with_2xx_takes_effect_once(service, tmp_path):
    service.send("1", "1", "2")  # there is no Redis yet
    forged = post(f"{service.url}/webhook", b"{}", f"t={int(time.time())},v1=00")
    assert forged == 401
    redis = ensure_redis(tmp_path / "redis")
    service.env["REDIS_URL"] = redis.url
    try:
        worker = service.start(*WORKER)
        until(lambda: service.results() == ["1", "2"], worker)
        worker.kill()
        worker = service.start(*WORKER)
        service.send("1", "3")
        until(lambda: "3" in service.results(), worker)
        worker.terminate()
        assert worker.wait(30) == 0
        assert service.results() == ["1", "2", "3"]
    finally:
        redis.stop()


def test_while_the_database_is_busy_the_sender_is_told_to_come_again(service, tmp_path):
    body = json.dumps({KEY: "1"}).encode()
    head = {"Signature": sign("new", body)}
    request = urllib.request.Request(f"{service.url}/webhook", body, head)
    with closing(sqlite3.connect(tmp_path / "service.db")) as other:
        other.execute("begin immediate")
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        assert (error.value.code, error.value.headers["Retry-After"]) == (503, "5")
    assert urllib.request.urlopen(request, timeout=30).status == 200
