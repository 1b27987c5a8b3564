"""Once per slot, whoever ticks: `python slots.py` from a Kubernetes CronJob, `tick` from any scheduler in Python."""

import os
import sqlite3
import time
from contextlib import closing

# [slots]
PERIOD = float(os.environ.get("PERIOD", "86400"))


def create() -> None:
    with closing(connect()) as db:
        db.execute("CREATE TABLE IF NOT EXISTS slots (schedule TEXT, slot BIGINT, PRIMARY KEY (schedule, slot))")
        db.execute("CREATE TABLE IF NOT EXISTS jobs (slot BIGINT)")


def connect() -> sqlite3.Connection:
    return sqlite3.connect(os.environ["STORE"], timeout=15)


def claim(db: sqlite3.Connection, schedule: str, slot: int) -> bool:
    row = "INSERT INTO slots (schedule, slot) VALUES (?, ?) ON CONFLICT DO NOTHING"
    return db.execute(row, (schedule, slot)).rowcount == 1


def tick() -> None:
    slot = int(time.time() // PERIOD)
    # One transaction: no slot without its job, no job without its slot. A crash in it leaves the slot to the next tick.
    with closing(connect()) as db, db:
        if claim(db, "manifest", slot):
            # Only the job, into an outbox or a table that workers read; never the work.
            db.execute("INSERT INTO jobs (slot) VALUES (?)", (slot,))


# [/slots]
if __name__ == "__main__":
    tick()
