"""What others put on the queue, and which requests are the same one."""

from patterns.typed_jobs import Payload

QUEUE = "labels"


class Task(Payload, extra="ignore"):  # a field that a sender adds later is no error
    parcel: str
    grams: int


def key_of(task: Task) -> str:
    """Not the job's id: a sender that retries makes a second job with another one."""
    return str(task.parcel)
