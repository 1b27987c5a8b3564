"""A command: its id, which is the key, and its options. The token stays in the database."""

from pydantic import BaseModel

from patterns.core.job import JobRequest

QUEUE = "chat"


class Task(BaseModel):
    interaction: str
    question: str


def job_of(asked) -> JobRequest:
    task = Task.model_validate({**asked.options, "interaction": asked.id})
    data = task.model_dump(mode="json")
    return JobRequest("task", data, key=asked.id, queue=QUEUE)
