"""python shop.py create | submit ORDER… | work: each order is charged, then gets a label.

An order is the row of its event: what is not settled in `steps` is still to do, whoever died with it.
"""

import json
import os
import sqlite3
import sys
import time
import urllib.error
import urllib.request

store = sqlite3.connect(os.environ["STORE"], timeout=20, isolation_level=None)
STEPS = (("charge", os.environ["BANK_URL"] + "/charges"), ("label", os.environ["CARRIER_URL"] + "/labels"))


def call(step, url, order):
    head = {"Idempotency-Key": f"{step}/{order}"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps({"order": order}).encode(), head), timeout=5).close()


def handle(order):
    """Seconds until it is tried again, 0 when it is settled."""
    for step, url in STEPS:
        try:
            call(step, url, order)
        except urllib.error.HTTPError as error:
            if error.code in (400, 422):
                settle("insert into failed values (?, ?)", order, f"{step}: {error.code}")
                return 0
            return float(error.headers["Retry-After"] or 1)
        except OSError:
            return 1
    settle("insert into labels values (?)", order)
    return 0


def settle(statement, order, *more):
    store.execute("begin immediate")
    if store.execute("update steps set due = null where id = ? and due is not null", (order,)).rowcount:
        store.execute(statement, (order, *more))
    store.execute("commit")


def work():
    claim = (
        "update steps set due = ? where id = (select id from steps where due <= ? order by due limit 1) returning id"
    )
    while True:
        orders = store.execute(claim, (time.time() + 8, time.time())).fetchall()
        for (order,) in orders:
            if wait := handle(order):
                store.execute("update steps set due = ? where id = ? and due is not null", (time.time() + wait, order))
        if not orders:
            time.sleep(0.1)


if sys.argv[1] == "create":
    store.execute("create table orders (id text)")
    store.execute("create table steps (id text primary key, due real)")
    store.execute("create table labels (id text)")
    store.execute("create table failed (id text, reason text)")
elif sys.argv[1] == "submit":
    for order in sys.argv[2:]:
        store.execute("begin immediate")
        if store.execute("insert or ignore into steps values (?, 0)", (order,)).rowcount:
            store.execute("insert into orders values (?)", (order,))
        store.execute("commit")
else:
    work()
