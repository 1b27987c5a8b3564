"""What this service takes: imported by senders and by the worker."""

from patterns.typed_jobs import Payload

QUEUE = "labels"


class Task(Payload, extra="ignore"):  # senders may add fields
    parcel: str
    grams: int


def key_of(task: Task) -> str:
    return str(task.parcel)
