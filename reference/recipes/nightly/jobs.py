"""What a run is told, by the clock or by hand."""

from patterns.typed_jobs import Payload

QUEUE = "reports"


class Task(Payload):
    date: str
    pages: int
