"""Five ways in which people write their first background work; each buys a label for an order.

HOW=pop (cron, outbox-less, cache-guard, thread) shop.py      (the worker)        shop.py submit ORDER…
"""

import json
import os
import sqlite3
import sys
import threading
import time
import urllib.request

import redis

HOW = os.environ["HOW"]
server = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)


def database():
    db = sqlite3.connect(os.environ["STORE"], timeout=20, isolation_level=None)
    db.execute("create table if not exists orders (id text, status text)")
    db.execute("create table if not exists labels (id text)")
    return db


def buy(order):
    data = json.dumps({"order": order}).encode()
    request = urllib.request.Request(os.environ["CARRIER_URL"] + "/labels", data)
    urllib.request.urlopen(request, timeout=10).close()


def pop():
    """Takes a job from a list, does it."""
    while True:
        _, order = server.blpop("jobs")
        buy(order)
        database().execute("insert into labels values (?)", (order,))


def cron():
    """Every second: whatever is still open is done, then marked."""
    while True:
        for (order,) in database().execute("select id from orders where status = 'open'").fetchall():
            buy(order)
            database().execute("insert into labels values (?)", (order,))
            database().execute("update orders set status = 'done' where id = ?", (order,))
        time.sleep(1)


def outbox_less():
    """Listens to what the sender published after its commit."""
    listener = server.pubsub()
    listener.subscribe("orders")
    for message in listener.listen():
        if message["type"] == "message":
            buy(message["data"])
            database().execute("insert into labels values (?)", (message["data"],))


def cache_guard():
    """A flag in Redis, set before the work, so that nothing is done twice."""
    while True:
        _, order = server.blpop("jobs")
        try:
            if server.set(f"done:{order}", "1", nx=True):
                buy(order)
                database().execute("insert into labels values (?)", (order,))
        except OSError:
            server.rpush("jobs", order)


def thread():
    """Answers at once, works in a thread of its own."""

    def work(order):
        buy(order)
        database().execute("insert into labels values (?)", (order,))

    while True:
        _, order = server.blpop("jobs")
        threading.Thread(target=work, args=(order,), daemon=True).start()


def submit(*orders):
    for order in orders:
        database().execute("insert into orders values (?, 'open')", (order,))
        if HOW == "outbox-less":
            server.publish("orders", order)
        elif HOW != "cron":
            server.rpush("jobs", order)


if __name__ == "__main__":
    if sys.argv[1:]:
        submit(*sys.argv[2:])
    else:
        {"pop": pop, "cron": cron, "outbox-less": outbox_less, "cache-guard": cache_guard, "thread": thread}[HOW]()
