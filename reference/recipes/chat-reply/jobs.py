"""A command: its interaction, whose token stays in the database, and its options."""

from pydantic import BaseModel

from patterns.core.job import JobRequest

QUEUE = "chat"


class Task(BaseModel):
    interaction: str
    question: str


def job_of(asked) -> JobRequest:
    task = Task.model_validate({**asked.options, "interaction": asked.id})
    return JobRequest("task", task.model_dump(mode="json"), key=asked.id, queue=QUEUE)
