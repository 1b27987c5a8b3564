"""The weight of a shipment, part by part: as a chord, whose body is lost with any member, and counted in the database.

celery -A chord_shop worker | python chord_shop.py create | stock SHIPMENT | counted SHIPMENT | replay KEY
"""

import os
import sqlite3
import sys
from contextlib import closing
from typing import Any

import requests
from celery import Celery, chord
from celery_jobs import Job, Relay, create, enqueue, reliable, replay, transaction

from studyhall.patterns.outside_call.ledger import check_status

LONGEST, PARTS = float(os.environ.get("LONGEST", "60")), 2
app = Celery("chord_shop", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(reliable(LONGEST))
Relay.resend = 2 * LONGEST
app.steps["worker"].add(Relay)


def connect() -> sqlite3.Connection:
    return sqlite3.connect(os.environ["STORE"], timeout=15, isolation_level=None)


Job.connect = staticmethod(connect)


def weigh(shipment: str, number: int) -> int:
    url = f"{os.environ['CARRIER_URL']}/weights/{shipment}/{number}"
    answer = requests.post(url, json={}, timeout=LONGEST / 2)
    check_status(answer.status_code, 5)
    return int(answer.json()["id"])


# Celery's own settings, but for the results, which a chord needs.
stock = app.task(acks_late=False, reject_on_worker_lost=False, ignore_result=False)


@stock
def stock_part(shipment: str, number: int) -> int:
    return weigh(shipment, number)


@stock
def stock_total(weights: list[int], shipment: str) -> None:
    with closing(connect()) as db:
        db.execute("INSERT INTO totals (shipment, weight) VALUES (?, ?)", (shipment, sum(weights)))


# [counted]
def start(db: Any, shipment: str) -> None:
    with transaction(db):
        db.execute("INSERT INTO shipments (shipment, missing, weight) VALUES (?, ?, 0)", (shipment, PARTS))
        for number in range(PARTS):
            enqueue(db, "chord_shop.part", f"{shipment}/{number}", shipment=shipment, number=number)


@app.task(base=Job)
def part(shipment: str, number: int) -> Any:
    weight = weigh(shipment, number)

    def save(db: Any) -> None:
        # Once per part, as all effects are. The UPDATE locks the row: exactly one part sees that none is missing.
        count = "UPDATE shipments SET missing = missing - 1, weight = weight + ? WHERE shipment = ? RETURNING missing"
        if db.execute(count, (weight, shipment)).fetchone()[0] == 0:
            enqueue(db, "chord_shop.total", f"total/{shipment}", shipment=shipment)

    return save


@app.task(base=Job)
def total(shipment: str) -> Any:
    copy = "INSERT INTO totals (shipment, weight) SELECT shipment, weight FROM shipments WHERE shipment = ?"
    return lambda db: db.execute(copy, (shipment,)).rowcount


# [/counted]


if __name__ == "__main__":
    verb, word = [*sys.argv[1:], "", ""][:2]
    with closing(connect()) as db:
        if verb == "create":
            create(db)
            db.execute("CREATE TABLE shipments (shipment TEXT PRIMARY KEY, missing INTEGER, weight INTEGER)")
            db.execute("CREATE TABLE totals (shipment TEXT, weight INTEGER)")
        elif verb == "stock":
            chord(stock_part.s(word, number) for number in range(PARTS))(stock_total.s(word))
        elif verb == "counted":
            start(db, word)
        elif verb == "replay":
            replay(db, word)
        else:
            sys.exit(__doc__)
