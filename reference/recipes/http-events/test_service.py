"""python -m pytest test_service.py: a receiver that fails, one that refuses, a kill -9."""

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
WORKER = ["worker.py"]
SUBMIT = ["submit.py"]
OUTBOX = "python -m patterns.outbox.command"
EXAMPLE = " --amount 1"  # without the key


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        ident = self.headers["Idempotency-Key"]
        self.server.calls.append(ident)
        self.send_response(self.server.answers(ident))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def receivers():
    """By name: `calls` lists the ids received, `answers(ident)` is the status sent."""
    servers = {}
    for name in ("crm", "mail"):
        servers[name] = server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        server.calls, server.answers = [], lambda ident: 200
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers
    for server in servers.values():
        server.shutdown()
        server.server_close()


def until(condition, *processes):
    ends = time.monotonic() + 120
    while not condition():
        assert all(process.poll() is None for process in processes), "ended, see above"
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.05)


def test_every_receiver_gets_each_event_whatever_the_other_says(receivers, tmp_path):
    crm, mail = receivers["crm"], receivers["mail"]
    urls = [
        f"{name}=http://127.0.0.1:{receiver.server_port}"  # by the names of the fixture
        for name, receiver in receivers.items()
    ]
    env = {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{tmp_path}/service.db",
        "RECEIVERS": " ".join(urls),
        "SIGNING_SECRET": "test",
        "LEASE": "2",
    }

    def run(*command):
        kwargs = {"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "text": True}
        return subprocess.run([sys.executable, *command], **kwargs, check=True).stdout

    def worker():
        return subprocess.Popen([sys.executable, *WORKER], cwd=ROOT, env=env)

    def taken(server, *keys):
        return all(any(f".{key}." in ident for ident in server.calls) for key in keys)

    def refused():
        listed = run(*OUTBOX.split()[1:]).splitlines()
        return [line for line in listed if "refused with 400" in line]

    crm.answers = lambda ident: 500
    mail.answers = lambda ident: 400 if ".2." in ident else 200
    # A repeat adds nothing.
    run(*SUBMIT, "1", "2", "3", "1", *EXAMPLE.split())
    process = worker()
    try:
        until(lambda: taken(mail, "1", "2", "3") and crm.calls, process)
        process.kill()
        process.wait()
        crm.answers, crm.calls[:] = lambda ident: 200, []
        process = worker()
        until(lambda: taken(crm, "1", "2", "3"), process)
        until(refused, process)  # the kill may have come before the answer was recorded
        (line,) = refused()
        mail.answers, mail.calls[:] = lambda ident: 200, []
        run(*OUTBOX.split()[1:], "retry", "mail", line.split()[0])
        until(lambda: taken(mail, "2"), process)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
