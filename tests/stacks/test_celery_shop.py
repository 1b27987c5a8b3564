"""What `prove` does not see of Celery: slots, dead letters, the transaction of the caller, Django, FastAPI, chords."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from guide import stacks
from harness.missing import missing
from harness.ports import free_port
from harness.processes import start_tied

pytestmark = pytest.mark.slow

SHOP = stacks.SERVICES / "celery"


class Carrier(ThreadingHTTPServer):
    """Sells labels, mails them, takes manifests; answers 422 if `refuses` is in the path, and not before `answers`."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.made: Counter[str] = Counter()
        self.refuses = "nothing"
        self.answers, self.asked = threading.Event(), 0
        self.answers.set()

    def handle_error(self, request, client_address):
        """The client was killed meanwhile."""


class _Handler(BaseHTTPRequestHandler):
    server: Carrier

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        self.server.answers.wait(60)
        refuses = self.server.refuses in self.path
        if not refuses:
            self.server.made[f"{self.path} {self.headers['Idempotency-Key']}"] += 1
        body = json.dumps({"id": "1"}).encode()
        self.send_response(422 if refuses else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Shop:
    def __init__(self, folder, redis, carrier):
        self.folder, self.running = folder, list[subprocess.Popen[bytes]]()
        address = f"http://127.0.0.1:{carrier.server_address[1]}"
        self.environment = {
            **os.environ,
            **{"PATH": f"{stacks.BUILT / 'celery' / 'bin'}{os.pathsep}{os.environ['PATH']}"},
            **{"REDIS_URL": redis, "STORE": str(folder / "shop.db"), "PYTHONPATH": str(SHOP.parents[1])},
            **{"CARRIER_URL": address, "MAILER_URL": address, "LONGEST": "8", "NIGHT": "2"},
        }
        self.run("python", "shop.py", "create")

    def run(self, *command):
        done = subprocess.run(
            command, cwd=SHOP, env=self.environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def start(self, *command):
        with (self.folder / f"{len(self.running)}.log").open("wb") as log:
            self.running.append(
                start_tied(command, cwd=SHOP, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
            )
        return self.running[-1]

    def serve(self, web):
        address = f"127.0.0.1:{(port := free_port())}"
        self.start("uvicorn", web, "--port", str(port), "--log-level", "warning")
        poll(lambda: answer(f"http://{address}/") != 0, f"{web} did not start")
        return f"http://{address}"

    def rows(self, query):
        with contextlib.closing(sqlite3.connect(self.environment["STORE"], timeout=10)) as db:
            return db.execute(query).fetchall()

    def until(self, query, enough, limit=120):
        poll(lambda: enough(self.rows(query)), query, limit)

    def work(self, app="shop", processes=2):
        options = ["-c", str(processes), "--without-gossip", "--without-mingle", "-l", "INFO"]
        return self.start("celery", "-A", app, "worker", *options)

    def close(self):
        for process in self.running:
            process.terminate()
        for process in self.running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def poll(done, what, limit=120):
    deadline = time.monotonic() + limit
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def answer(address):
    """The status of a POST; 0: nobody answers."""
    try:
        return httpx2.post(address, timeout=30).status_code
    except httpx2.ConnectError:
        return 0


def kill(worker):
    """With its pool, whose processes would finish their tasks without their parent."""
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait(10)


@pytest.fixture
def carrier():
    server = Carrier()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def shop(tmp_path, own_redis, carrier):
    try:
        stacks.install("celery")
    except stacks.NotHere as error:
        missing("Celery", str(error))
    started = Shop(tmp_path, own_redis.url, carrier)
    yield started
    started.close()


def test_three_beats_make_one_manifest_per_slot(shop, carrier, tmp_path):
    shop.work()
    for number in range(3):
        shop.start("celery", "-A", "shop", "beat", "-s", str(tmp_path / f"beat-{number}"), "--pidfile", "")
    shop.until("SELECT slot FROM manifests", lambda rows: len(rows) >= 4)
    slots = [slot for (slot,) in shop.rows("SELECT slot FROM manifests")]
    assert len(slots) == len(set(slots))
    assert set(carrier.made.values()) == {1}
    first, last = min(slots), max(slots)
    assert {row[0] for row in shop.rows("SELECT slot FROM slots")} >= set(range(first, last + 1))


def test_a_refused_label_is_a_dead_letter_and_is_bought_once_when_replayed(shop, carrier):
    carrier.refuses = "/"
    shop.work()
    shop.run("python", "shop.py", "submit", "p1")
    shop.until("SELECT key FROM dead_letters", lambda rows: rows == [("label/p1",)])
    assert "HTTP 422" in shop.run("python", "shop.py", "dead")
    carrier.refuses = "nothing"
    shop.run("python", "shop.py", "replay", "label/p1")
    shop.until("SELECT parcel FROM mailed", lambda rows: rows == [("p1",)])
    assert sorted(carrier.made.values()) == [1, 1]


def test_an_order_that_is_rolled_back_sends_nothing(shop):
    script = (
        "import shop\nfrom contextlib import closing\n"
        "with closing(shop.connect()) as db:\n"
        "    try:\n"
        "        with shop.transaction(db):\n"
        "            shop.enqueue(db, 'shop.buy_label', 'label/ghost', parcel='ghost', address='x')\n"
        "            raise KeyError\n"
        "    except KeyError:\n"
        "        pass\n"
    )
    shop.run("python", "-c", script)
    assert shop.rows("SELECT key FROM jobs") == []


@pytest.mark.fault
def test_an_order_of_django_or_fastapi_gets_its_receipt_once_and_on_commit_loses_it(shop, carrier, own_redis):
    """Redis is away when the orders come, and the worker is killed while it mails the receipts."""
    shop.environment["LONGEST"] = "4"
    shop.run("python", "django_shop.py", "create")
    django, fastapi = shop.serve("django_shop:web"), shop.serve("fastapi_shop:web")
    own_redis.kill()
    assert answer(f"{django}/on-commit/lost") == 500
    assert answer(f"{django}/orders/d1") == answer(f"{fastapi}/orders/f1") == 202
    own_redis.restart()
    assert answer(f"{django}/on-commit/sent") == 202
    carrier.answers.clear()
    worker = shop.work("django_shop")
    poll(lambda: carrier.asked >= 2, "both receipts are being mailed")
    kill(worker)
    carrier.answers.set()
    shop.work("django_shop")
    receipts = "SELECT order_id FROM receipts ORDER BY order_id"
    shop.until(receipts, lambda rows: rows == [("d1",), ("f1",), ("sent",)])
    assert shop.rows("SELECT key, state FROM jobs ORDER BY key") == [("receipt/d1", "done"), ("receipt/f1", "done")]
    assert ("lost",) in shop.rows("SELECT number FROM orders")


@pytest.mark.fault
def test_a_chord_loses_its_body_with_a_member_and_the_counted_one_does_not(shop, carrier):
    """One killed worker, and one part that fails for good and is replayed."""
    shop.environment["LONGEST"] = "6"
    shop.run("python", "chord_shop.py", "create")
    carrier.answers.clear()
    worker = shop.work("chord_shop", processes=4)
    for kind in ("stock", "counted"):
        shop.run("python", "chord_shop.py", kind, f"{kind}-killed")
    poll(lambda: carrier.asked >= 4, "all four parts run")
    kill(worker)
    carrier.refuses = "refused/1"
    carrier.answers.set()
    shop.work("chord_shop", processes=4)
    for kind in ("stock", "counted"):
        shop.run("python", "chord_shop.py", kind, f"{kind}-refused")
    shop.until("SELECT key FROM jobs WHERE state = 'dead'", lambda rows: rows == [("counted-refused/1",)])
    carrier.refuses = "nothing"
    shop.run("python", "chord_shop.py", "replay", "counted-refused/1")
    shop.run("python", "chord_shop.py", "stock", "stock-whole")
    totals = "SELECT shipment, weight FROM totals ORDER BY shipment"
    whole = [("counted-killed", 2), ("counted-refused", 2), ("stock-whole", 2)]
    shop.until(totals, lambda rows: len(rows) >= 3)
    assert shop.rows(totals) == whole
