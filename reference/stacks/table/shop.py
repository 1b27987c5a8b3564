"""Accounts at a vendor, no queue and no server: python shop.py create | submit EMAIL… | work."""

# [use]
import os
import sqlite3
from contextlib import closing

import httpx2 as httpx  # or requests
from table_worker import create, put, run

from studyhall.patterns.outside_call.dbapi import DbApiLedger
from studyhall.patterns.outside_call.http import sync_answer_of
from studyhall.patterns.outside_call.sync import SyncOutsideCalls
from studyhall.patterns.sync_inbox import execute, transaction

# As the vendor promises: no request runs longer, a key lives for a day.
LONGEST = float(os.environ.get("LONGEST", "30"))
http = httpx.Client(base_url=os.environ["VENDOR_URL"], timeout=LONGEST)


def connect():
    return sqlite3.connect(os.environ["STORE"], timeout=30)  # or psycopg.connect(url)


ledger = DbApiLedger(connect)  # once: ledger.create(), create(connection)
calls = SyncOutsideCalls(ledger, "vendor", longest=LONGEST, key_life=86_400)


def sign_up(email):  # your view calls it, then answers 202
    with closing(connect()) as db, transaction(db):
        execute(db, "INSERT INTO signups VALUES (?) ON CONFLICT DO NOTHING", email)
        put(db, "accounts", email)


def open_account(email):  # the worker calls it
    def send(key):
        head = {"Idempotency-Key": key}
        return sync_answer_of(lambda: http.post("/accounts", json={"email": email}, headers=head))

    account = calls.once(f"account/{email}", send)
    return lambda db: execute(db, "INSERT INTO accounts VALUES (?, ?)", email, account["id"])


def work():
    run(connect, "accounts", open_account, lease=LONGEST + 5, threads=4)


# [/use]
if __name__ == "__main__":
    import sys

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
