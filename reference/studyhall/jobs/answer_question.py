"""answer-question: the work behind the chat command `/ask`. The job names the interaction; its token stays in the
database."""

import time
from typing import Annotated

from pydantic import Field, StringConstraints

from studyhall import db
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.store import read
from studyhall.patterns.pipeline import JobContext
from studyhall.patterns.typed_jobs import Payload
from studyhall.services import Services

# The reply itself retries work and sending while its token lives: 15 minutes.
CHAT = RetryPolicy(base=1.0, cap=10.0, attempts=3, max_age=930.0)
DOCUMENTS_READ = 20
TEXT_READ = 200_000


class AnswerQuestion(Payload):
    interaction_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
    owner: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    question: Annotated[str, Field(min_length=1, max_length=1_000)]


async def answer_question(ctx: JobContext, payload: AnswerQuestion) -> dict[str, str]:
    services: Services = ctx.services
    assert services.chat is not None, "this worker has no chat platform to answer to"

    async def work(seconds: float) -> str:
        return await services.provider.answer(
            payload.question,
            await _texts(ctx, payload.owner),
            key=ctx.provider_key("answer"),
            deadline=time.monotonic() + seconds,
        )

    return {"state": await services.chat.replies.answer(payload.interaction_id, services.chat.webhook, work)}


async def _texts(ctx: JobContext, owner: str) -> str:
    async with read(ctx.store) as connection:
        documents = await db.documents_of(connection, owner, limit=DOCUMENTS_READ)
        texts = [
            await db.text(connection, document.id, owner) or "" for document in documents if document.status == "ready"
        ]
    return "\n\n".join(texts)[:TEXT_READ]
