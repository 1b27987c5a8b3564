"""What may be asked of this service: imported by whoever sends, and by the worker."""

from patterns.typed_jobs import Payload

QUEUE = "messages"


class Task(Payload, extra="ignore"):  # senders may add fields
    order: str
    phone: str


def key_of(task: Task) -> str:
    return str(task.order)
