"""quiz-creation: medium. Questions from a text and its concept graph."""

import time
from typing import Annotated

from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncConnection

from studyhall import db
from studyhall.patterns.pipeline import Done, JobContext
from studyhall.providers import Advance
from studyhall.services import Services

from .reference import DocumentReference, graph_and_text


class CreateQuiz(DocumentReference):
    """Write a multiple-choice quiz about a document that has a concept graph."""

    questions: Annotated[int, Field(ge=1, le=50)] = 8


async def create_quiz(ctx: JobContext, payload: CreateQuiz) -> Done:
    services: Services = ctx.services
    await ctx.progress("preparing", 5, "reading text and concepts")
    graph, text = await graph_and_text(ctx.store, payload)

    async def on_progress(step: Advance) -> None:
        percent = 10 + 80 * step.done / max(step.total, 1)
        await ctx.progress("writing", percent, f"question {step.done} of {step.total}")

    quiz = await services.provider.quiz(
        text,
        graph,
        key=ctx.provider_key(f"quiz-{ctx.attempt}"),  # why the attempt: see graph_generation
        on_progress=on_progress,
        deadline=time.monotonic() + ctx.remaining(),
        questions=payload.questions,
    )
    await ctx.progress("validating", 95, f"{len(quiz.questions)} questions")

    async def save(tx: AsyncConnection) -> None:
        await db.save_quiz(tx, payload.document_id, services.provider.name, quiz)

    return Done({"document_id": payload.document_id, "questions": len(quiz.questions)}, save)
