"""The same shop as Celery's first steps teach it: its default settings, `.delay()`, `self.retry()`."""

import os
import sqlite3
import sys

import requests
from celery import Celery

app = Celery("shop", broker=os.environ["REDIS_URL"])


def connect():
    return sqlite3.connect(os.environ["STORE"])


def post(url, body):
    answer = requests.post(url, json=body, timeout=10)
    answer.raise_for_status()
    return answer.json()


@app.task(autoretry_for=(requests.RequestException,), retry_backoff=True, max_retries=5)
def buy_label(parcel, address, crash=False):
    if crash:
        os.kill(os.getppid(), 9)
    if not address:
        raise ValueError("the parcel has no address")
    label = post(os.environ["CARRIER_URL"] + "/labels", {"parcel": parcel})
    with connect() as db:
        db.execute("INSERT INTO labels VALUES (?, ?)", (parcel, label["id"]))
    mail_label.delay(parcel, label["id"])


@app.task(autoretry_for=(requests.RequestException,), retry_backoff=True, max_retries=5)
def mail_label(parcel, label):
    post(os.environ["MAILER_URL"] + "/mails", {"parcel": parcel, "label": label})
    with connect() as db:
        db.execute("INSERT INTO mailed VALUES (?, ?)", (parcel, label))


if __name__ == "__main__":
    if sys.argv[1] == "create":
        connect().executescript("CREATE TABLE labels (parcel, label); CREATE TABLE mailed (parcel, label)")
    elif sys.argv[1] == "submit":
        address = "" if "--no-address" in sys.argv else os.environ["NOTE"]
        for parcel in [word for word in sys.argv[2:] if not word.startswith("--")]:
            buy_label.delay(parcel, address, crash="--crash" in sys.argv)
