"""Accounts at a vendor, no queue and no server: python shop.py create | submit EMAIL… | work."""

import os
import sqlite3
import sys
from contextlib import closing

# [use]
import httpx2 as httpx  # or requests

from studyhall.patterns.outside_call.dbapi import DbApiLedger
from studyhall.patterns.outside_call.http import sync_answer_of
from studyhall.patterns.outside_call.sync import SyncOutsideCalls
from studyhall.patterns.sync_inbox import execute, transaction
from studyhall.patterns.table_worker import create, put, run

http = httpx.Client(base_url=os.environ["VENDOR_URL"], timeout=float(os.environ.get("LONGEST", "30")))


def connect():
    return sqlite3.connect(os.environ["STORE"], timeout=30)  # or psycopg.connect(url)


# By the vendor's own documentation: a request ends within 30 s, a key lives for a day.
ledger = DbApiLedger(connect)
calls = SyncOutsideCalls(ledger, "vendor", longest=float(os.environ.get("LONGEST", "30")), key_life=86_400)


def sign_up(email: str) -> None:  # your view calls it and answers 202
    with closing(connect()) as db, transaction(db):
        execute(db, "INSERT INTO signups VALUES (?) ON CONFLICT DO NOTHING", email)
        put(db, "accounts", email)


def open_account(email: str):  # the worker calls it
    def send(key: str):
        body, head = {"email": email}, {"Idempotency-Key": key}
        return sync_answer_of(lambda: http.post("/accounts", json=body, headers=head))

    account = calls.once(f"account/{email}", send)
    return lambda db: execute(db, "INSERT INTO accounts VALUES (?, ?)", email, account["id"])


def work() -> None:
    run(connect, "accounts", open_account, lease=float(os.environ.get("LEASE", "60")), threads=4)


# [/use]
if __name__ == "__main__":
    if sys.argv[1] == "create":
        with closing(connect()) as db:
            db.execute("PRAGMA journal_mode = wal")
            db.execute("CREATE TABLE signups (email TEXT PRIMARY KEY)")
            db.execute("CREATE TABLE accounts (email TEXT NOT NULL, vendor_id TEXT NOT NULL)")
            create(db)
        ledger.create()
    elif sys.argv[1] == "work":
        work()
    else:
        for email in sys.argv[2:]:
            sign_up(email)
