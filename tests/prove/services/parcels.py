"""A small service that buys one label per parcel: Redis lists, SQLite and a carrier, no library beside redis-py.

It keeps its promises, unless DEFECT names one that it breaks: each defect is one line's difference.

    parcels.py worker NAME | api | foreign
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

DEFECT = os.environ.get("DEFECT", "")
LEASE = float(os.environ.get("LEASE", "1.5"))
QUEUE = "parcels"
kept: list[bytes] = []
stopping = threading.Event()


def client() -> redis.Redis:
    never = Retry(NoBackoff(), 0)
    return redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True, socket_timeout=3, retry=never)


class Store:
    """SQLite, or PostgreSQL where STORE is its address."""

    def __init__(self) -> None:
        where = os.environ["STORE"]
        self.postgres = where.startswith("postgresql:")
        if self.postgres:
            import psycopg

            self.connection = psycopg.connect(where, autocommit=True)
        else:
            self.connection = sqlite3.connect(where, timeout=10, isolation_level=None)
        unique = "" if DEFECT == "adds-again" else "primary key"
        try:
            self.execute(f"create table if not exists labels (parcel text {unique}, label text)")
            self.execute("create table if not exists failed (parcel text primary key, reason text)")
        except Exception:  # of PostgreSQL: the other worker makes them at the same moment
            if not self.postgres:
                raise

    def execute(self, words: str, values: tuple[str, ...] = ()) -> None:
        self.connection.execute(words.replace("?", "%s") if self.postgres else words, values)

    def fail(self, parcel: str, reason: str) -> None:
        self.execute("insert into failed values (?, ?) on conflict do nothing", (parcel, reason))


def submit(*jobs: str) -> int:
    while True:
        try:
            with client() as server:
                server.lpush(QUEUE, *jobs)
                return 0
        except redis.RedisError as error:
            if DEFECT != "submits-forever":
                print(f"not taken: {error}")
                return 1
            time.sleep(0.1)


class Refused(Exception):
    pass


def buy(parcel: str) -> str:
    """The label, under a key of the parcel: the carrier sells it once."""
    if not os.environ.get("CARRIER_URL"):
        time.sleep(0.03)
        return f"label of {parcel}"
    for attempt in range(200):
        key = f"label-{hash(parcel)}" if DEFECT == "nameless" else f"label-{parcel}"
        key = f"label-{random.random()}" if DEFECT in ("new-key", "adds-again") else key
        asked = urllib.request.Request(
            f"{os.environ['CARRIER_URL']}/labels",
            json.dumps({"parcel": key if DEFECT == "nameless" else parcel}).encode(),
            {"Content-Type": "application/json", "Idempotency-Key": key},
        )
        pause = min(0.2 * 2**attempt, 2)
        try:
            with urllib.request.urlopen(asked, timeout=float(os.environ.get("TIMEOUT", "5"))) as answer:
                return str(json.load(answer)["id"])
        except urllib.error.HTTPError as error:
            if error.code == 422 or DEFECT == "gives-up":
                raise Refused(f"the carrier said {error.code}") from None
            if error.code == 429 and DEFECT != "ignores-retry-after":
                pause = float(error.headers["Retry-After"])
        except OSError:
            pass
        time.sleep(0.001 if DEFECT == "hammers" else pause)
    raise Refused("the carrier did not answer")


def handle(raw: str, database: Store, server: redis.Redis) -> None:
    try:
        job = json.loads(raw)
        parcel = job["parcel"]
    except (ValueError, KeyError, TypeError) as error:
        if DEFECT == "chokes":
            raise
        database.fail(raw[:40], f"cannot be read: {error}")
        return
    if DEFECT == "prints":
        print("handling", raw)
    if DEFECT == "leaks":
        kept.append(random.randbytes(4_000_000))
    if DEFECT != "no-crash-budget" and int(server.incr(f"tries:{parcel}")) > 3:
        database.fail(parcel, "its worker died three times")
        return
    if job.get("crash"):
        os._exit(7)
    try:
        if job.get("grams", 0) < 0:
            raise Refused("a parcel weighs something")
        label = buy(parcel)
        again = "" if DEFECT == "adds-again" else "on conflict do nothing"
        database.execute(f"insert into labels values (?, ?) {again}", (parcel, label))
    except Refused as error:
        if DEFECT != "swallows":
            database.fail(parcel, str(error))
    server.delete(f"tries:{parcel}")


def take_over(server: redis.Redis, own: str) -> None:
    """Work of workers that no longer renew their lease goes back to the queue."""
    for name in server.scan_iter("working:*"):
        holder = name.removeprefix("working:")
        if holder != own and not server.exists(f"alive:{holder}"):
            while server.lmove(name, QUEUE, "RIGHT", "RIGHT"):
                pass


def renew(own: str) -> None:
    while True:
        try:
            with client() as server:
                while True:
                    server.set(f"alive:{own}", "1", px=int(LEASE * 1000))
                    time.sleep(LEASE / 4)
        except redis.RedisError:
            time.sleep(0.1)


def work(name: str) -> int:
    own = f"{name}-{os.getpid()}"
    if DEFECT != "dies-of-term":
        signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    if DEFECT == "orphans":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    threading.Thread(target=renew, args=(own,), daemon=True).start()
    database, idle = Store(), 0
    while not stopping.is_set():
        try:
            with client() as server:
                # what it held when Redis went away: done or not, the next run finds out
                while server.lmove(f"working:{own}", QUEUE, "RIGHT", "RIGHT"):
                    pass
                begun = server.info("server")["run_id"]
                while not stopping.is_set():
                    if DEFECT == "deaf" and server.info("server")["run_id"] != begun:
                        stopping.wait()
                    if DEFECT != "no-takeover":
                        take_over(server, own)
                    if DEFECT == "pops":
                        raw = server.rpop(QUEUE)
                    else:
                        raw = server.lmove(QUEUE, f"working:{own}", "RIGHT", "LEFT")
                    if raw is None:
                        idle += 1
                        time.sleep(4 if DEFECT == "sleepy" and idle > 40 else 0.03)
                        continue
                    idle = 0
                    handle(str(raw), database, server)
                    server.lrem(f"working:{own}", 1, str(raw))
        except redis.RedisError as error:
            print(f"redis: {error}")
            if DEFECT == "deaf":
                stopping.wait()
            time.sleep(0.1)
    return 0


class Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200)

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(503 if submit(json.dumps({**job, "note": os.environ.get("NOTE", "")})) else 202)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def serve(port: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ThreadingHTTPServer(("127.0.0.1", port), Api).serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "api":
        serve(int(os.environ["PORT"]))
    if sys.argv[1] == "worker":
        sys.exit(work(sys.argv[2]))
    sys.exit(submit("{broken", "[]", '{"colour": "red"}'))
