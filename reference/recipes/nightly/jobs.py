"""The input of a run, by the clock or by hand."""

from patterns.typed_jobs import Payload

QUEUE = "reports"


class Task(Payload):
    date: str
    pages: int
