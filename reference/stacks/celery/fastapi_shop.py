"""The task of `django_shop`, sent from FastAPI: uvicorn fastapi_shop:web"""

import os
import sqlite3
from contextlib import closing

from celery_jobs import enqueue, transaction
from fastapi import FastAPI

web = FastAPI()


# [fastapi]
@web.post("/orders/{number}", status_code=202)
def place(number: str) -> dict[str, str]:
    """A plain `def` runs in a thread: a database that blocks does not stop the others."""
    with closing(sqlite3.connect(os.environ["STORE"], timeout=15, isolation_level=None)) as db, transaction(db):
        db.execute("INSERT INTO orders (number) VALUES (?) ON CONFLICT DO NOTHING", (number,))
        enqueue(db, "django_shop.receipt", f"receipt/{number}", order=number)
    return {"order": number}


# [/fastapi]
