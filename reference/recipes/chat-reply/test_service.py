"""python -m pytest test_service.py: a platform that fails, a kill -9, no Redis."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from nacl.signing import SigningKey

from gateway import deferred
from patterns.core.open_store import close, create_all, open_store
from patterns.deferred_reply import DeferredReplies
from patterns.engine import ensure_redis
from patterns.producer import Producer

ROOT = Path(__file__).parent
API = ["api.py"]
WORKER = ["worker.py"]
SEND = ["send.py"]
EXAMPLE = " --question text"  # without the key
OPTIONS = '{"x": 1, "question": "text"}'


class Platform(BaseHTTPRequestHandler):
    """Answers the first edit of every message with 500."""

    edits: list[str] = []  # noqa: RUF012  of all its instances

    def do_PATCH(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.edits.append(self.path)
        self.send_response(500 if self.edits.count(self.path) == 1 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def until(condition, *processes):
    ends = time.monotonic() + 120
    while not condition():
        assert all(process.poll() is None for process in processes), "ended, see above"
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.1)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def status(url, body=None):
    try:
        return urllib.request.urlopen(url, body, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None  # not listening yet


def answered(ident):
    return Platform.edits.count(f"/webhooks/app/token-{ident}/messages/@original") >= 2


class Command:
    """The part of discord.py's command that is used."""

    id, application_id, token = 2, "app", "token-2"

    def __init__(self):
        self.said = []
        self.response = SimpleNamespace(defer=self.defer)

    async def defer(self):
        self.said.append("thinking")

    async def edit_original_response(self, content):
        self.said.append(content)


def free_port():
    """Below the ports of outgoing connections: one of those could take it before the server does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture
def service(tmp_path):
    platform = ThreadingHTTPServer(("127.0.0.1", 0), Platform)
    threading.Thread(target=platform.serve_forever, daemon=True).start()
    port = free_port()
    redis = ensure_redis(tmp_path / "redis")
    key = SigningKey.generate()
    env = {
        **os.environ,
        "REDIS_URL": redis.url,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'service.db'}",
        "API_URL": f"http://127.0.0.1:{port}/interactions",
        "PLATFORM_URL": f"http://127.0.0.1:{platform.server_port}",
        "PUBLIC_KEY": key.verify_key.encode().hex(),
        "SIGNING_KEY": key.encode().hex(),
    }
    running = []

    def start(*command):
        running.append(subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env))
        return running[-1]

    try:
        api = start(*API, str(port))
        health = env["API_URL"].replace("interactions", "healthz")
        until(lambda: status(health) == 200, api)
        yield SimpleNamespace(env=env, start=start, redis=redis)
    finally:
        for process in running:
            process.kill()
            process.wait()
        redis.stop()
        platform.shutdown()
        platform.server_close()


async def by_gateway(env):
    store, producer = open_store(env["DATABASE_URL"]), Producer(env["REDIS_URL"])
    await create_all(store)
    command = Command()
    await deferred(DeferredReplies(store), producer, command, **json.loads(OPTIONS))
    await producer.close()
    await close(store)
    return command.said


def test_every_command_is_answered_once_and_nobody_is_left_thinking(service):
    def send(ident):
        command = [sys.executable, *SEND, ident, *EXAMPLE.split()]
        kwargs = {"cwd": ROOT, "env": service.env, "stderr": subprocess.PIPE}
        return subprocess.run(command, **kwargs, text=True, check=False).stderr

    assert status(service.env["API_URL"], b"{}") == 401, "not signed"
    worker = service.start(*WORKER)
    assert send("1") == ""
    until(lambda: Platform.edits, worker)
    worker.kill()  # after the first edit, which failed
    worker.wait()
    worker = service.start(*WORKER)
    assert asyncio.run(by_gateway(service.env)) == ["thinking"]
    until(lambda: answered("1") and answered("2"), worker)
    worker.terminate()
    assert worker.wait(30) == 0
    service.redis.stop()
    until(lambda: gone(service.redis.pid))
    assert "I cannot take questions right now" in send("3")
