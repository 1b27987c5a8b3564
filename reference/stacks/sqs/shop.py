"""Labels, mails and the nightly manifest of a shop, with SQS and SNS.

python shop.py create | work | submit PARCEL… | dead | redrive QUEUE KEY
"""

import logging
import os
import sqlite3
import sys
import time
from contextlib import closing, suppress
from typing import Any

# [setup]
import requests
from sqs_jobs import Worker, create, dead_letters, declare, enqueue, redrive, transaction

from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.outside_call.dbapi import DbApiLedger
from studyhall.patterns.outside_call.ledger import check_status
from studyhall.patterns.outside_call.sync import SyncOutsideCalls

LONGEST = float(os.environ.get("LONGEST", "60"))  # seconds the longest job takes
VISIBILITY = int(os.environ.get("VISIBILITY", "30"))  # seconds until the job of a dead worker shows again
NIGHT = float(os.environ.get("NIGHT", "86400"))  # seconds from one manifest to the next
TIMEOUT = LONGEST / 2


def connect() -> sqlite3.Connection:
    # psycopg.connect(url, autocommit=True) is all that PostgreSQL needs
    db = sqlite3.connect(os.environ["STORE"], timeout=15, isolation_level=None)
    db.execute("PRAGMA synchronous = FULL")
    return db


carrier = SyncOutsideCalls(DbApiLedger(connect), "carrier", longest=TIMEOUT, key_life=86_400)
mailer = SyncOutsideCalls(DbApiLedger(connect), "mailer", longest=TIMEOUT, key_life=86_400)


def post(url: str, body: dict[str, Any], key: str) -> Any:
    answer = requests.post(url, json=body, headers={"Idempotency-Key": key}, timeout=(3, TIMEOUT * 0.8))
    check_status(answer.status_code, float(answer.headers.get("Retry-After", 5)))
    return answer.json()


# [/setup]
# [handlers]
def buy_label(parcel: str, address: str, crash: bool = False) -> Any:
    if crash:
        os.kill(os.getpid(), 9)  # as the kernel does when memory runs out
    if not address:
        raise Permanent("the parcel has no address")
    url = os.environ["CARRIER_URL"] + "/labels"
    label = carrier.once(f"label/{parcel}", lambda key: post(url, {"parcel": parcel}, key))

    def save(db: Any) -> None:
        db.execute("INSERT INTO labels (parcel, label, at) VALUES (?, ?, ?)", (parcel, label["id"], time.time()))
        # An event of the outbox: it exists if, and only if, the label does. Every queue of the topic gets a copy.
        enqueue(db, "bought.fifo", f"bought/{parcel}", group=parcel, parcel=parcel, label=label["id"])

    return save


def mail_label(parcel: str, label: str) -> Any:
    url = os.environ["MAILER_URL"] + "/mails"
    mailer.once(f"mail/{parcel}", lambda key: post(url, {"parcel": parcel, "label": label}, key))
    return lambda db: db.execute("INSERT INTO mailed (parcel, label) VALUES (?, ?)", (parcel, label))


def bill(parcel: str, label: str) -> Any:
    return lambda db: db.execute("INSERT INTO bills (parcel) VALUES (?)", (parcel,))


# [/handlers]
# [slots]
def tick() -> None:
    """Every worker calls it every second: the row lets one job per slot through."""
    slot = int(time.time() // NIGHT)
    with closing(connect()) as db, transaction(db):
        last = db.execute("SELECT max(slot) FROM slots").fetchone()[0]
        # Slots missed while no worker ran are made up for, at most a week.
        for missed in range(max(slot if last is None else last + 1, slot - 6), slot + 1):
            db.execute("INSERT INTO slots (slot) VALUES (?) ON CONFLICT DO NOTHING", (missed,))
            enqueue(db, "manifests", f"manifest/{missed}", slot=missed)


# [/slots]
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


# [wiring]
HANDLERS = {"labels": buy_label, "mails.fifo": mail_label, "bills.fifo": bill, "manifests": manifest}
TOPICS = {"bought.fifo": ["mails.fifo", "bills.fifo"]}


def work() -> None:
    logging.basicConfig(level=logging.INFO)
    Worker(connect, HANDLERS, longest=LONGEST, visibility=VISIBILITY, topics=TOPICS, also=tick).run()


# [/wiring]


def submit(parcels: list[str], address: str, crash: bool) -> None:
    """What a view does: the order and its job in one transaction. SQS may be away."""
    with closing(connect()) as db, transaction(db):
        for parcel in parcels:
            db.execute("INSERT INTO parcels (parcel) VALUES (?) ON CONFLICT DO NOTHING", (parcel,))
            extra = {"crash": True} if crash else {}
            enqueue(db, "labels", f"label/{parcel}", parcel=parcel, address=address, **extra)


def create_all() -> None:
    DbApiLedger(connect).create()
    with closing(connect()) as db:
        db.execute("PRAGMA journal_mode = WAL")
        create(db)
        db.executescript(
            "CREATE TABLE IF NOT EXISTS parcels (parcel TEXT PRIMARY KEY);"
            "CREATE TABLE IF NOT EXISTS labels (parcel TEXT, label TEXT, at REAL, slot INTEGER);"
            "CREATE TABLE IF NOT EXISTS mailed (parcel TEXT, label TEXT);"
            "CREATE TABLE IF NOT EXISTS bills (parcel TEXT);"
            "CREATE TABLE IF NOT EXISTS slots (slot INTEGER PRIMARY KEY);"
            "CREATE TABLE IF NOT EXISTS manifests (slot INTEGER, parcels INTEGER)"
        )
    declare(HANDLERS, TOPICS, VISIBILITY)


if __name__ == "__main__":
    verb, *rest = sys.argv[1:] or ["help"]
    if verb == "create":
        create_all()
    elif verb == "work":
        work()
    elif verb == "submit":
        keys = [word for word in rest if not word.startswith("--")]
        submit(keys, "" if "--no-address" in rest else os.environ.get("NOTE", "1 Main Street"), "--crash" in rest)
    elif verb == "dead":
        with closing(connect()) as db:
            print(*(f"{queue}  {key}  {reason}" for queue, key, reason in dead_letters(db)), sep="\n")
    elif verb == "redrive":
        for calls in (carrier, mailer):
            with suppress(Permanent):  # not refused there
                calls.resolve(rest[1], again=True)
        with closing(connect()) as db:
            redrive(db, *rest)
    else:
        sys.exit(__doc__)
