"""connection-explanations: AI-dependent, of any length. Why the strongest connections of a graph hold."""

import time
from typing import Annotated

from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncConnection

from studyhall import db
from studyhall.patterns.pipeline import Done, JobContext
from studyhall.providers import Advance
from studyhall.services import Services

from .reference import DocumentReference, graph_and_text


class ExplainConnections(DocumentReference):
    """Explain up to `connections` links of a document's concept graph, the strongest first."""

    connections: Annotated[int, Field(ge=1, le=100)] = 12


async def explain_connections(ctx: JobContext, payload: ExplainConnections) -> Done:
    services: Services = ctx.services
    await ctx.progress("preparing", 5, "choosing connections")
    graph, text = await graph_and_text(ctx.store, payload)
    strongest = sorted(graph.links, key=lambda link: (-link.weight, link.source, link.target))

    async def on_progress(step: Advance) -> None:
        percent = 10 + 80 * step.done / max(step.total, 1)
        await ctx.progress("explaining", percent, f"connection {step.done} of {step.total}")

    explanations = await services.provider.explain(
        strongest[: payload.connections],
        text,
        key=ctx.provider_key(f"explain-{ctx.attempt}"),  # why the attempt: see graph_generation
        on_progress=on_progress,
        deadline=time.monotonic() + ctx.remaining(),
    )
    await ctx.progress("validating", 95, f"{len(explanations)} explanations")

    async def save(tx: AsyncConnection) -> None:
        await db.save_explanations(tx, payload.document_id, services.provider.name, explanations)

    return Done({"document_id": payload.document_id, "explanations": len(explanations)}, save)
