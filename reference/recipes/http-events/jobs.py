"""What happened, and its event: rows of one transaction."""

import os

from pydantic import BaseModel
from sqlalchemy import Column, Table, Text

from patterns import outbox
from patterns.core.event import Event
from patterns.core.store import insert, metadata

QUEUE = "invoices"
# "crm=https://… mail=https://…": events wait under the receiver's name
RECEIVERS = dict(pair.split("=", 1) for pair in os.environ["RECEIVERS"].split())
key = Column("key", Text, primary_key=True)
results = Table("results", metadata, key, Column("body", Text))


class Task(BaseModel):
    invoice: str
    amount: int


async def record(tx, task: Task, what: str = "created"):
    """In your transaction; a repeat has the same id and adds nothing."""
    key, data = str(task.invoice), task.model_dump(mode="json")
    names = {"id": f"{QUEUE}.{key}.{what}", "type": f"{QUEUE}.{what}.v1"}
    event = Event(**names, source=f"/{QUEUE}", subject=key, data=data)
    row = {"key": key, "body": task.model_dump_json()}
    await tx.execute(insert(tx, results).values(row).on_conflict_do_nothing())
    await outbox.add(tx, event, to=RECEIVERS)
