"""Labels, mails and the nightly manifest of a shop, with Celery.

celery -A shop worker | celery -A shop beat | python shop.py submit PARCEL… | dead | replay KEY
"""

import os
import sqlite3
import sys
import time
from contextlib import closing, suppress
from typing import Any

# [setup]
import requests
from celery import Celery
from celery.signals import worker_init
from celery_jobs import Job, Relay, create, dead_letters, enqueue, reliable, replay, transaction

from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.outside_call.dbapi import DbApiLedger
from studyhall.patterns.outside_call.ledger import check_status
from studyhall.patterns.outside_call.sync import SyncOutsideCalls

LONGEST = float(os.environ.get("LONGEST", "60"))  # seconds of the longest task
NIGHT = float(os.environ.get("NIGHT", "86400"))  # seconds from one manifest to the next
TIMEOUT = LONGEST / 2

app = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"))
app.conf.update(reliable(LONGEST))
app.conf.beat_schedule = {"manifest": {"task": "shop.tick", "schedule": NIGHT / 4}}
Relay.resend = 2 * LONGEST
app.steps["worker"].add(Relay)


def connect() -> sqlite3.Connection:
    # psycopg.connect(url, autocommit=True) is all that PostgreSQL needs
    db = sqlite3.connect(os.environ["STORE"], timeout=15, isolation_level=None)
    db.execute("PRAGMA synchronous = FULL")
    return db


Job.connect = staticmethod(connect)
carrier = SyncOutsideCalls(DbApiLedger(connect), "carrier", longest=TIMEOUT, key_life=86_400)
mailer = SyncOutsideCalls(DbApiLedger(connect), "mailer", longest=TIMEOUT, key_life=86_400)


def post(url: str, body: dict[str, Any], key: str) -> Any:
    answer = requests.post(url, json=body, headers={"Idempotency-Key": key}, timeout=(3, TIMEOUT * 0.8))
    check_status(answer.status_code, float(answer.headers.get("Retry-After", 5)))
    return answer.json()


# [/setup]
# [tasks]
@app.task(base=Job)
def buy_label(parcel: str, address: str, crash: bool = False) -> Any:
    if crash:
        os.kill(os.getppid(), 9)  # as the kernel does when memory runs out
    if not address:
        raise Permanent("the parcel has no address")
    url = os.environ["CARRIER_URL"] + "/labels"
    label = carrier.once(f"label/{parcel}", lambda key: post(url, {"parcel": parcel}, key))

    def save(db: Any) -> None:
        db.execute("INSERT INTO labels (parcel, label, at) VALUES (?, ?, ?)", (parcel, label["id"], time.time()))
        # an event of the outbox: it exists if, and only if, the label does
        enqueue(db, "shop.mail_label", f"mail/{parcel}", parcel=parcel, label=label["id"])

    return save


@app.task(base=Job)
def mail_label(parcel: str, label: str) -> Any:
    url = os.environ["MAILER_URL"] + "/mails"
    mailer.once(f"mail/{parcel}", lambda key: post(url, {"parcel": parcel, "label": label}, key))
    return lambda db: db.execute("INSERT INTO mailed (parcel, label) VALUES (?, ?)", (parcel, label))


# [/tasks]


# [slots]
@app.task
def tick() -> None:
    """Every beat calls this, more often than needed: the key lets one job per slot through."""
    slot = int(time.time() // NIGHT)
    with closing(connect()) as db, transaction(db):
        last = db.execute("SELECT max(slot) FROM slots").fetchone()[0]
        # Slots missed while no beat ran are made up for, a week at most.
        for missed in range(max(slot if last is None else last + 1, slot - 6), slot + 1):
            db.execute("INSERT INTO slots (slot) VALUES (?) ON CONFLICT DO NOTHING", (missed,))
            enqueue(db, "shop.manifest", f"manifest/{missed}", slot=missed)


@app.task(base=Job)
def manifest(slot: int) -> Any:
    with closing(connect()) as db:
        until = (slot * NIGHT,)
        parcels = [row[0] for row in db.execute("SELECT parcel FROM labels WHERE at < ? AND slot IS NULL", until)]
    url = os.environ["CARRIER_URL"] + "/manifests"
    carrier.once(f"manifest/{slot}", lambda key: post(url, {"slot": slot, "parcels": parcels}, key))

    def save(db: Any) -> None:
        db.execute("INSERT INTO manifests (slot, parcels) VALUES (?, ?)", (slot, len(parcels)))
        db.executemany("UPDATE labels SET slot = ? WHERE parcel = ?", [(slot, parcel) for parcel in parcels])

    return save


# [/slots]


def submit(parcels: list[str], address: str, crash: bool) -> None:
    """What a view does: the order and its job in one transaction. Redis may be away."""
    with closing(connect()) as db, transaction(db):
        for parcel in parcels:
            db.execute("INSERT INTO parcels (parcel) VALUES (?) ON CONFLICT DO NOTHING", (parcel,))
            extra = {"crash": True} if crash else {}
            enqueue(db, "shop.buy_label", f"label/{parcel}", parcel=parcel, address=address, **extra)


@worker_init.connect
def create_tables(**_: Any) -> None:
    DbApiLedger(connect).create()
    with closing(connect()) as db:
        db.execute("PRAGMA journal_mode = WAL")
        create(db)
        db.executescript(
            "CREATE TABLE IF NOT EXISTS parcels (parcel TEXT PRIMARY KEY);"
            "CREATE TABLE IF NOT EXISTS labels (parcel TEXT, label TEXT, at REAL, slot INTEGER);"
            "CREATE TABLE IF NOT EXISTS mailed (parcel TEXT, label TEXT);"
            "CREATE TABLE IF NOT EXISTS slots (slot INTEGER PRIMARY KEY);"
            "CREATE TABLE IF NOT EXISTS manifests (slot INTEGER, parcels INTEGER);"
            "CREATE VIEW IF NOT EXISTS dead_letters AS SELECT key, reason FROM jobs WHERE state = 'dead'"
        )


if __name__ == "__main__":
    verb, *rest = sys.argv[1:] or ["help"]
    if verb == "create":
        create_tables()
    elif verb == "submit":
        keys = [word for word in rest if not word.startswith("--")]
        submit(keys, "" if "--no-address" in rest else os.environ.get("NOTE", "1 Main Street"), "--crash" in rest)
    elif verb == "dead":
        with closing(connect()) as db:
            print(*(f"{key}  {reason}" for key, _, reason in dead_letters(db)), sep="\n")
    elif verb == "replay":
        for calls in (carrier, mailer):
            with suppress(Permanent):  # not refused there
                calls.resolve(rest[0], again=True)
        with closing(connect()) as db:
            replay(db, rest[0])
    else:
        sys.exit(__doc__)
