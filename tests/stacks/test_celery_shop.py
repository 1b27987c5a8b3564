"""What `prove` does not see of the Celery shop: slots, dead letters, the transaction of the caller."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from guide import stacks
from harness.missing import missing
from harness.redis import RedisServer

SHOP = stacks.SERVICES / "celery"


class Carrier(ThreadingHTTPServer):
    """Sells labels, mails them, takes manifests; `refuses`: with 422."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.made: Counter[str] = Counter()
        self.refuses = False


class _Handler(BaseHTTPRequestHandler):
    server: Carrier

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.refuses:
            self.server.made[f"{self.path} {self.headers['Idempotency-Key']}"] += 1
        body = json.dumps({"id": "1"}).encode()
        self.send_response(422 if self.server.refuses else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Shop:
    def __init__(self, folder: Path, redis: str, carrier: Carrier) -> None:
        self.folder, self.running = folder, list[subprocess.Popen[bytes]]()
        address = f"http://127.0.0.1:{carrier.server_address[1]}"
        self.environment = {
            **os.environ,
            **{"PATH": f"{stacks.BUILT / 'celery' / 'bin'}{os.pathsep}{os.environ['PATH']}"},
            **{"REDIS_URL": redis, "STORE": str(folder / "shop.db"), "PYTHONPATH": str(SHOP.parents[1])},
            **{"CARRIER_URL": address, "MAILER_URL": address, "LONGEST": "8", "NIGHT": "2"},
        }
        self.run("python", "shop.py", "create")

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=SHOP, env=self.environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def start(self, *command: str) -> None:
        log = (self.folder / f"{len(self.running)}.log").open("wb")
        self.running.append(
            subprocess.Popen(command, cwd=SHOP, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        )

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with contextlib.closing(sqlite3.connect(self.environment["STORE"], timeout=10)) as db:
            return db.execute(query).fetchall()

    def until(
        self, query: str, enough: Callable[[list[tuple[object, ...]]], bool], limit: float = 120
    ) -> None:
        deadline = time.monotonic() + limit
        while not enough(self.rows(query)):
            assert time.monotonic() < deadline, f"{query}: {self.rows(query)}"
            time.sleep(0.1)

    def work(self) -> None:
        self.start(
            "celery", "-A", "shop", "worker", "-c", "2", "--without-gossip", "--without-mingle", "-l", "INFO"
        )

    def close(self) -> None:
        for one in self.running:
            one.terminate()
        for one in self.running:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    server = Carrier()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def shop(tmp_path: Path, own_redis: RedisServer, carrier: Carrier) -> Iterator[Shop]:
    try:
        stacks.install("celery")
    except stacks.NotHere as error:
        missing("Celery", str(error))
    one = Shop(tmp_path, own_redis.url, carrier)
    yield one
    one.close()


def test_three_beats_make_one_manifest_per_slot(shop: Shop, carrier: Carrier, tmp_path: Path) -> None:
    shop.work()
    for number in range(3):
        shop.start("celery", "-A", "shop", "beat", "-s", str(tmp_path / f"beat-{number}"), "--pidfile", "")
    shop.until("SELECT slot FROM manifests", lambda rows: len(rows) >= 4)
    slots = [slot for (slot,) in shop.rows("SELECT slot FROM manifests")]
    assert len(slots) == len(set(slots))
    assert set(carrier.made.values()) == {1}
    first, last = min(slots), max(slots)
    assert {row[0] for row in shop.rows("SELECT slot FROM slots")} >= set(range(first, last + 1))


def test_a_refused_label_is_a_dead_letter_and_is_bought_once_when_replayed(
    shop: Shop, carrier: Carrier
) -> None:
    carrier.refuses = True
    shop.work()
    shop.run("python", "shop.py", "submit", "p1")
    shop.until("SELECT key FROM dead_letters", lambda rows: rows == [("label/p1",)])
    assert "HTTP 422" in shop.run("python", "shop.py", "dead")
    carrier.refuses = False
    shop.run("python", "shop.py", "replay", "label/p1")
    shop.until("SELECT parcel FROM mailed", lambda rows: rows == [("p1",)])
    assert sorted(carrier.made.values()) == [1, 1]


def test_an_order_that_is_rolled_back_sends_nothing(shop: Shop) -> None:
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
