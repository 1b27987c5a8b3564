"""graph-generation: long and AI-dependent. It remembers each part it has done; a crash costs one part."""

import time

from sqlalchemy.ext.asyncio import AsyncConnection

from studyhall import db
from studyhall.patterns.pipeline import Done, JobContext
from studyhall.providers import Advance, ConceptGraph
from studyhall.services import Services

from .reference import DocumentReference, ready_text


class GenerateGraph(DocumentReference):
    """Find the concepts of a processed document and how they are connected."""


async def generate_graph(ctx: JobContext, payload: GenerateGraph) -> Done:
    services: Services = ctx.services
    await ctx.progress("preparing", 2, "reading the text")
    text = await ready_text(ctx.store, payload)

    async def on_progress(step: Advance) -> None:
        if step.state is not None:
            await ctx.checkpoint(step.state)
        if step.stage == "analysing":
            percent = 5 + 80 * step.done / max(step.total, 1)
            message = f"part {step.done} of {step.total}"
            await ctx.progress("analysing", percent, message, done=step.done, total=step.total)
        else:
            await ctx.progress(step.stage, 90, "connecting the concepts")

    graph = await services.provider.concept_graph(
        text,
        # The attempt is part of the key. A crash does not count as one, so a call that may have been paid for
        # is found again; a malformed answer does count, and its key would fetch that very answer again.
        key=ctx.provider_key(f"graph-{ctx.attempt}"),
        on_progress=on_progress,
        deadline=time.monotonic() + ctx.remaining(),
        resume=ctx.checkpointed,
    )
    await ctx.progress("validating", 95, f"{len(graph.concepts)} concepts, {len(graph.links)} links")
    graph = ConceptGraph.model_validate(graph.model_dump())

    async def save(tx: AsyncConnection) -> None:
        await db.save_graph(tx, payload.document_id, services.provider.name, graph)

    return Done(
        {
            "document_id": payload.document_id,
            "concepts": len(graph.concepts),
            "links": len(graph.links),
            "coverage": round(graph.coverage, 3),
        },
        save,
    )
