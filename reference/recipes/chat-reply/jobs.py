"""A command: its id, which is the key, and its options. Its token stays in the database."""

from pydantic import BaseModel

from patterns.core.request import JobRequest

QUEUE = "chat"


class Task(BaseModel):
    interaction: str
    question: str


KEY = next(iter(Task.model_fields))


def job_of(asked) -> JobRequest:
    task = Task.model_validate({**asked.options, KEY: asked.id})
    return JobRequest("task", task.model_dump(), key=asked.id, queue=QUEUE)
