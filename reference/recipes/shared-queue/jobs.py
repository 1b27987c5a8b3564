"""What others put on the queue, and which requests are the same."""

from patterns.typed_jobs import Payload

QUEUE = "labels"


class Task(Payload, extra="ignore"):  # senders may add fields
    parcel: str
    grams: int


def key_of(task: Task) -> str:
    """Not the job's id: a sender that retries makes a second job with a new id."""
    return str(task.parcel)
