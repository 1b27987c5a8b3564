"""What this service takes: imported by senders and by the worker."""

from patterns.typed_jobs import Payload

QUEUE = "messages"


class Task(Payload, extra="ignore"):  # senders may add fields
    order: str
    phone: str


def key_of(task: Task) -> str:
    return str(task.order)
