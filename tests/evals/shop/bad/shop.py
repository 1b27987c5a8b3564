"""python shop.py create | submit ORDER… | work: each order is charged, then gets a label."""

import json
import os
import sqlite3
import sys
import urllib.request

import redis

server = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
store = sqlite3.connect(os.environ["STORE"], timeout=20, isolation_level=None)


def call(url, order):
    body = json.dumps({"order": order}).encode()
    urllib.request.urlopen(url, body, timeout=5).close()


def work():
    while True:
        _, order = server.blpop("orders")
        handle(order)


def handle(order):
    for _ in range(5):
        try:
            call(os.environ["BANK_URL"] + "/charges", order)
            call(os.environ["CARRIER_URL"] + "/labels", order)
            store.execute("insert into labels values (?)", (order,))
            return
        except OSError as error:
            print("trying again:", error)


if sys.argv[1] == "create":
    store.execute("create table orders (id text)")
    store.execute("create table labels (id text)")
    store.execute("create table failed (id text, reason text)")
elif sys.argv[1] == "submit":
    for order in sys.argv[2:]:
        store.execute("insert into orders values (?)", (order,))
        server.rpush("orders", order)
else:
    work()
