import sqlite3

import redis
from arq import create_pool
from rq import Queue
from tenacity import retry, stop_after_attempt
from requests.adapters import HTTPAdapter
from urllib3.util import Retry
import requests

jobs = Queue(connection=redis.Redis())
http = requests.Session()
http.mount("https://", HTTPAdapter(max_retries=Retry(total=5, status_forcelist=[400, 500, 502])))  # fault: inner-retry, retried-4xx


async def send_invoice(ctx, order_id):
    return await post_invoice(order_id)


@retry(stop=stop_after_attempt(5))  # fault: inner-retry
async def post_invoice(order_id):
    return await api.post("/invoices", order_id)


def store(db: sqlite3.Connection, order):
    db.execute("INSERT OR REPLACE INTO orders (id, state) VALUES (?, 'new')", (order,))  # fault: replace-effect-row
    db.execute(
        """
        REPLACE INTO payments (id, amount)  -- fault: replace-effect-row
        VALUES (?, ?)
        """,
        (order, 5),
    )
    db.execute("INSERT OR REPLACE INTO page_cache VALUES (?)", (order,))


def place(conn, order):
    with conn:
        conn.execute("INSERT INTO orders VALUES (?)", (order,))
        jobs.enqueue(send_invoice, order)  # fault: publish-in-transaction


def place_later(conn, order):
    with conn:
        conn.execute("INSERT INTO orders VALUES (?)", (order,))
    jobs.enqueue(send_invoice, order)


def fetch_rates():
    return http.get("https://rates.example")  # fault: http-no-timeout


def fetch_right():
    return http.get("https://rates.example", timeout=5)
