"""Every StudyHall payload is a reference to a document. The document itself stays in the database."""

from typing import Annotated

from pydantic import StringConstraints
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall import db
from studyhall.patterns.core.errors import Permanent, Transient
from studyhall.patterns.core.store import read
from studyhall.patterns.typed_jobs import Payload
from studyhall.providers import ConceptGraph

Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
OwnerName = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class DocumentReference(Payload):
    """Which document, and whose: a job that names another owner finds nothing."""

    document_id: Id
    owner: OwnerName


class UnknownDocument(Permanent):
    """This owner has no such document. It was deleted meanwhile, or the job names the wrong owner."""


class NotReady(Transient):
    """The stage before this one has not stored its result yet. Add the stages as one flow."""


async def ready_text(store: AsyncEngine, reference: DocumentReference) -> str:
    """The text of a processed document; a rejected one is a permanent failure for every later stage."""
    async with read(store) as connection:
        document = await db.document(connection, reference.document_id, reference.owner)
        if document is None:
            raise UnknownDocument(str(UnknownDocument.__doc__))
        if document.status == "rejected":
            raise Permanent(f"the document was rejected: {document.error}")
        text = await db.text(connection, reference.document_id, reference.owner)
    if text is None:
        raise NotReady(str(NotReady.__doc__))
    return text


async def graph_and_text(store: AsyncEngine, reference: DocumentReference) -> tuple[ConceptGraph, str]:
    text = await ready_text(store, reference)
    async with read(store) as connection:
        graph = await db.graph(connection, reference.document_id, reference.owner)
    if graph is None:
        raise NotReady(str(NotReady.__doc__))
    return graph, text
