"""A payment provider for demo and tests: a process of its own, over HTTP, with the failures real ones have.

    python -m studyhall.payment_sandbox --port 0 --data-dir DIR     prints {"url": "http://127.0.0.1:…", …}

    POST /v1/charges  Idempotency-Key, {"amount", "currency", "customer", "method"}: 201, again 200, or 402
    POST /v1/refunds  Idempotency-Key, {"charge_key"}: 201, "refunded", or "voided" when nothing was charged
    GET  /v1/charges?key=…: 200 or 404
    GET  /admin/ledger      POST /admin/faults      DELETE /admin/faults      GET /healthz

Promises: one effect per key, whatever is repeated; the same key with another body is 422; a refund of a key
that was never charged voids it, and a charge that arrives later under that key is refused (409). Killed and
started again on the same directory, it knows everything it answered.

Faults, by admin call `{"kind", "operation": "charge"|"refund"|"find", "times": n, "seconds": s}` or by paying
with one of `CARDS`: decline (402), rate-limit (429 with Retry-After), unavailable (503, nothing happened),
lost-answer (it happened, the connection drops), hang (nothing happens, nobody answers), late (it happens, but
only after `seconds`).

Not a model of real money: no capture, no disputes, no exchange rates. Loopback only, no authentication.
"""

import argparse
import hashlib
import json
import os
import socket
import sqlite3
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from studyhall.patterns.parent_death import die_with_parent

KINDS = ("decline", "rate-limit", "unavailable", "lost-answer", "hang", "late")
# method: (fault, does it hold for every try?)
CARDS = {
    "card_declined": ("decline", True),
    "card_rate_limited": ("rate-limit", False),
    "card_unavailable": ("unavailable", False),
    "card_lost_answer": ("lost-answer", False),
    "card_hangs": ("hang", False),
}
MAX_BODY = 64 * 1024
SCHEMA = """
CREATE TABLE IF NOT EXISTS charge (key TEXT PRIMARY KEY, body TEXT, id TEXT, status TEXT, amount INTEGER,
    currency TEXT, customer TEXT, at REAL);
CREATE TABLE IF NOT EXISTS refund (key TEXT PRIMARY KEY, charge_key TEXT UNIQUE, id TEXT, status TEXT,
    at REAL);
CREATE TABLE IF NOT EXISTS fault (id INTEGER PRIMARY KEY, kind TEXT, operation TEXT, times INTEGER,
    seconds REAL);
CREATE TABLE IF NOT EXISTS call (id INTEGER PRIMARY KEY, operation TEXT, key TEXT, fault TEXT, at REAL,
    status INTEGER);
"""
Response = tuple[int, dict[str, Any], dict[str, str]]


class Sandbox:
    """The ledger. Every method is one transaction."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "payments.db"
        self._turn = threading.Lock()
        with closing(self._connect()) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(SCHEMA)

    def charge(self, key: str, body: dict[str, Any], *, declined: bool = False) -> Response:
        amount, customer = body.get("amount"), body.get("customer")
        if not isinstance(amount, int) or isinstance(amount, bool) or not 0 < amount <= 10_000_000:
            return _error(400, "invalid_amount", "amount is a whole number of cents, 1 to 10000000")
        if not isinstance(customer, str) or not customer:
            return _error(400, "invalid_customer", "customer is missing")
        canonical, currency = json.dumps(body, sort_keys=True), str(body.get("currency", "EUR"))
        status = "declined" if declined else "succeeded"
        with self._turn, closing(self._connect()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            if known := db.execute("SELECT * FROM charge WHERE key = ?", (key,)).fetchone():
                if known["body"] != canonical:
                    return _error(422, "key_reused", "this key was used with another body: take a new key")
                return _charged(known, 200)
            if db.execute("SELECT 1 FROM refund WHERE charge_key = ?", (key,)).fetchone():
                return _error(409, "voided", "this key was voided before the charge arrived")
            values = (key, canonical, _id("ch", key), status, amount, currency, customer, time.time())
            db.execute("INSERT INTO charge VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            return _charged(db.execute("SELECT * FROM charge WHERE key = ?", (key,)).fetchone(), 201)

    def refund(self, key: str, body: dict[str, Any]) -> Response:
        charge_key = body.get("charge_key")
        if not isinstance(charge_key, str) or not charge_key:
            return _error(400, "invalid_charge_key", "charge_key is missing")
        with self._turn, closing(self._connect()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            if known := db.execute("SELECT * FROM refund WHERE key = ?", (key,)).fetchone():
                if known["charge_key"] != charge_key:
                    return _error(422, "key_reused", "this key was used with another body: take a new key")
                return 200, _refunded(known), {"Idempotent-Replayed": "true"}
            if db.execute("SELECT 1 FROM refund WHERE charge_key = ?", (charge_key,)).fetchone():
                return _error(409, "already_refunded", "this charge was refunded under another key")
            charged = db.execute("SELECT status FROM charge WHERE key = ?", (charge_key,)).fetchone()
            status = "refunded" if charged and charged["status"] == "succeeded" else "voided"
            values = (key, charge_key, _id("re", key), status, time.time())
            db.execute("INSERT INTO refund VALUES (?, ?, ?, ?, ?)", values)
            return 201, _refunded(db.execute("SELECT * FROM refund WHERE key = ?", (key,)).fetchone()), {}

    def find(self, key: str) -> Response:
        with closing(self._connect()) as db:
            known = db.execute("SELECT * FROM charge WHERE key = ?", (key,)).fetchone()
            if known is None:
                return _error(404, "no_such_charge", "nothing was charged under this key")
            refund = db.execute("SELECT status FROM refund WHERE charge_key = ?", (key,)).fetchone()
        return 200, {**_shown(known), "refunded": refund is not None}, {}

    def ledger(self) -> dict[str, Any]:
        """Everything, for tests and the demo. `net`: cents kept, charges minus refunds."""
        with closing(self._connect()) as db:
            charges = [dict(row) for row in db.execute("SELECT * FROM charge ORDER BY at")]
            refunds = [dict(row) for row in db.execute("SELECT * FROM refund ORDER BY at")]
            calls = [dict(row) for row in db.execute("SELECT * FROM call ORDER BY id")]
        back = {row["charge_key"] for row in refunds if row["status"] == "refunded"}
        kept = [row for row in charges if row["status"] == "succeeded" and row["key"] not in back]
        net = sum(row["amount"] for row in kept)
        return {"charges": charges, "refunds": refunds, "calls": calls, "net": net}

    def add_fault(self, body: dict[str, Any]) -> Response:
        kind, operation = body.get("kind"), body.get("operation", "charge")
        if kind not in KINDS or operation not in ("charge", "refund", "find"):
            text = f"kind is one of {', '.join(KINDS)}; operation is charge, refund or find"
            return _error(400, "invalid_fault", text)
        times, seconds = int(body.get("times", 1)), float(body.get("seconds", 1))
        with self._turn, closing(self._connect()) as db, db:
            db.execute(
                "INSERT INTO fault (kind, operation, times, seconds) VALUES (?, ?, ?, ?)",
                (kind, operation, times, seconds),
            )
        return 201, {"kind": kind, "operation": operation, "times": times, "seconds": seconds}, {}

    def clear_faults(self) -> Response:
        with self._turn, closing(self._connect()) as db, db:
            db.execute("DELETE FROM fault")
        return 200, {}, {}

    def called(self, operation: str, key: str, body: dict[str, Any]) -> tuple[int, str, float]:
        """Note the call and take the fault that is due for it, if any: (call number, kind, seconds)."""
        with self._turn, closing(self._connect()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            kind, seconds = "", 1.0
            due = db.execute(
                "SELECT * FROM fault WHERE operation = ? AND times > 0 ORDER BY id LIMIT 1", (operation,)
            ).fetchone()
            if due is not None:
                db.execute("UPDATE fault SET times = times - 1 WHERE id = ?", (due["id"],))
                kind, seconds = due["kind"], due["seconds"]
            elif operation == "charge" and body.get("method") in CARDS:
                kind, always = CARDS[body["method"]]
                before = "SELECT 1 FROM call WHERE operation = 'charge' AND key = ? LIMIT 1"
                if not always and db.execute(before, (key,)).fetchone():
                    kind = ""
            row = (operation, key, kind, time.time())
            cursor = db.execute("INSERT INTO call (operation, key, fault, at) VALUES (?, ?, ?, ?)", row)
            return int(cursor.lastrowid or 0), kind, seconds

    def worked(self, call: int, status: int) -> None:
        """Note the result of a call, whether or not its answer arrives."""
        with self._turn, closing(self._connect()) as db, db:
            db.execute("UPDATE call SET status = ? WHERE id = ?", (status, call))

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=10, isolation_level=None)
        db.row_factory = sqlite3.Row
        return db


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    sandbox: Sandbox

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/v1/charges":
            key = parse_qs(url.query).get("key", [""])[0]
            self._operate("find", key, {})
        elif url.path == "/admin/ledger":
            self._answer(200, self.sandbox.ledger())
        elif url.path == "/healthz":
            self._answer(200, {"status": "ok"})
        else:
            self._answer(*_error(404, "no_such_page", "see the docstring of studyhall.payment_sandbox"))

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 <= length <= MAX_BODY:
                raise ValueError("length")
            body = json.loads(self.rfile.read(length) or b"{}")
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except ValueError:
            self.close_connection = True
            self._answer(*_error(400, "invalid_body", f"send a JSON object of at most {MAX_BODY} bytes"))
            return
        key = self.headers.get("Idempotency-Key", "")
        if self.path == "/admin/faults":
            self._answer(*self.sandbox.add_fault(body))
        elif self.path not in ("/v1/charges", "/v1/refunds"):
            self._answer(*_error(404, "no_such_page", "see the docstring of studyhall.payment_sandbox"))
        elif not 0 < len(key) <= 255:
            self._answer(*_error(400, "key_missing", "send an Idempotency-Key header of 1 to 255 characters"))
        else:
            self._operate("charge" if self.path == "/v1/charges" else "refund", key, body)

    def do_DELETE(self) -> None:
        if self.path == "/admin/faults":
            self._answer(*self.sandbox.clear_faults())
        else:
            self._answer(*_error(404, "no_such_page", "see the docstring of studyhall.payment_sandbox"))

    def _operate(self, operation: str, key: str, body: dict[str, Any]) -> None:
        call, fault, seconds = self.sandbox.called(operation, key, body)
        if fault == "rate-limit":
            wait = {"Retry-After": f"{seconds:g}"}
            self._answer(429, {"error": {"code": "rate_limited", "message": "too many requests"}}, wait)
            return
        if fault == "unavailable":
            self._answer(*_error(503, "unavailable", "try again later; nothing happened"))
            return
        if fault == "hang":
            time.sleep(60)  # longer than any client here waits
            self.close_connection = True
            return
        if fault == "late":
            time.sleep(seconds)
        if operation == "charge":
            answer = self.sandbox.charge(key, body, declined=fault == "decline")
        else:
            answer = self.sandbox.refund(key, body) if operation == "refund" else self.sandbox.find(key)
        self.sandbox.worked(call, answer[0])
        if fault == "lost-answer":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._answer(*answer)

    def _answer(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(body).encode()
        try:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client gave up waiting, which is often the point

    def log_message(self, format: str, *args: object) -> None:
        """Silent: requests are in the `call` table."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def serve(port: int, data_dir: Path) -> ThreadingHTTPServer:
    """Bind to loopback; call `serve_forever()` on the result."""
    handler = type("Handler", (_Handler,), {"sandbox": Sandbox(data_dir)})
    return _Server(("127.0.0.1", port), handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="payment provider for demo and tests, on loopback")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--data-dir", type=Path, required=True, help="where charges are kept")
    parser.add_argument("--parent", type=int, help="pid of the process it ends with")
    options = parser.parse_args()
    if options.parent:
        die_with_parent(options.parent)
    server = serve(options.port, options.data_dir)
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_address[1]}", "pid": os.getpid()}), flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def _error(status: int, code: str, message: str) -> Response:
    return status, {"error": {"code": code, "message": message}}, {}


def _charged(row: sqlite3.Row, status: int) -> Response:
    shown = _shown(row)
    replayed = {"Idempotent-Replayed": "true"} if status == 200 else {}
    if row["status"] == "declined":
        return 402, {**shown, "error": {"code": "declined", "message": "the card was declined"}}, replayed
    return status, shown, replayed


def _shown(row: sqlite3.Row) -> dict[str, Any]:
    return {name: row[name] for name in ("id", "key", "status", "amount", "currency")}


def _refunded(row: sqlite3.Row) -> dict[str, Any]:
    return {name: row[name] for name in ("id", "charge_key", "status")}


def _id(prefix: str, key: str) -> str:
    return f"{prefix}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"


if __name__ == "__main__":
    main()
