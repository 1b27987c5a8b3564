"""What senders tell us; fields they add are ignored."""

from pydantic import BaseModel

QUEUE = "payments"


class Task(BaseModel):
    charge: str
    amount: int


KEY = next(iter(Task.model_fields))  # the same key again is a duplicate
