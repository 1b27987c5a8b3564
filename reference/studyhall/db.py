"""StudyHall's own tables. Inputs and results live here; jobs in Redis only carry references to them.

Every function takes the caller's connection: reads from `store.read`, writes from `store.begin` or from the
`save` of a job, where they share the transaction with the mark that the job is done. Every lookup by id also
takes the owner: an id from a queue or an address bar never opens somebody else's document.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    and_,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from .patterns.core.store import metadata

if TYPE_CHECKING:  # listing documents needs neither pydantic's models nor the parsers of files
    from pydantic import TypeAdapter

    from .documents import Extracted
    from .providers.results import ConceptGraph, Explanation, Quiz

documents = Table(
    "documents",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(200), nullable=False),
    Column("name", String(255), nullable=False),  # as uploaded: shown, never opened
    Column("blob", String(200), nullable=False),  # file in the blob folder
    Column("size", Integer, nullable=False),
    Column("sha256", String(64)),  # of the blob, compared before it is read
    Column("status", String(20), nullable=False, default="uploaded"),
    Column("kind", String(20)),
    Column("title", String(200)),
    Column("pages", Integer),
    Column("text", Text),
    Column("error_code", String(40)),
    Column("error", Text),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    CheckConstraint("status IN ('uploaded', 'ready', 'rejected')", name="documents_status"),
    Index("documents_owner", "owner", "created_at"),
    Index("documents_blob", "blob"),
)


def _result_table(name: str) -> Table:
    """One row per document and stage: a stage that runs again replaces its result."""
    return Table(
        name,
        metadata,
        Column("document_id", ForeignKey(documents.c.id, ondelete="CASCADE"), primary_key=True),
        Column("provider", String(120), nullable=False),
        Column("data", Text, nullable=False),
        Column("created_at", Float, nullable=False),
    )


graphs = _result_table("graphs")
quizzes = _result_table("quizzes")
explanation_sets = _result_table("explanations")

reminders = Table(
    "reminders",
    metadata,
    Column("document_id", ForeignKey(documents.c.id, ondelete="CASCADE"), primary_key=True),
    Column("reminded_at", Float, primary_key=True),
)

_SUMMARY = [column for column in documents.c if column.name != "text"]


@dataclass(frozen=True, slots=True)
class Document:
    """A document without its text, which may be megabytes; ask `text` for that."""

    id: str
    owner: str
    name: str
    blob: str
    size: int
    sha256: str | None
    status: str
    kind: str | None
    title: str | None
    pages: int | None
    error_code: str | None
    error: str | None
    created_at: float
    updated_at: float


async def add_document(
    tx: AsyncConnection, *, document_id: str, owner: str, name: str, blob: str, size: int, sha256: str | None = None
) -> None:
    now = time.time()
    # A NUL is legal in a multipart file name and an error in PostgreSQL.
    printable = "".join(character for character in name if character.isprintable())[:255] or "document"
    await tx.execute(
        insert(documents).values(
            id=document_id,
            owner=owner,
            name=printable,
            blob=blob,
            size=size,
            sha256=sha256,
            status="uploaded",
            created_at=now,
            updated_at=now,
        )
    )


async def document(connection: AsyncConnection, document_id: str, owner: str) -> Document | None:
    row = (await connection.execute(select(*_SUMMARY).where(_mine(document_id, owner)))).first()
    return Document(**row._mapping) if row else None


async def documents_of(connection: AsyncConnection, owner: str, *, limit: int = 100) -> list[Document]:
    """The owner's documents, newest first."""
    rows = await connection.execute(
        select(*_SUMMARY)
        .where(documents.c.owner == owner)
        .order_by(documents.c.created_at.desc(), documents.c.id)
        .limit(limit)
    )
    return [Document(**row._mapping) for row in rows]


async def text(connection: AsyncConnection, document_id: str, owner: str) -> str | None:
    result: str | None = await connection.scalar(select(documents.c.text).where(_mine(document_id, owner)))
    return result


async def save_text(tx: AsyncConnection, document_id: str, owner: str, extracted: Extracted) -> None:
    await _update(
        tx,
        document_id,
        owner,
        status="ready",
        kind=extracted.kind.value,
        title=extracted.title,
        pages=extracted.pages,
        text=extracted.text,
        error_code=None,
        error=None,
    )


async def reject(tx: AsyncConnection, document_id: str, owner: str, code: str, message: str) -> None:
    """Say why the document cannot be used, in words for its owner."""
    await _update(tx, document_id, owner, status="rejected", error_code=code, error=message)


async def replace_blob(tx: AsyncConnection, document_id: str, owner: str, *, blob: str, size: int, sha256: str) -> bool:
    """Another file for the same document, such as a repaired one; clears a rejection."""
    values = {"blob": blob, "size": size, "sha256": sha256, "status": "uploaded", "error_code": None, "error": None}
    return await _update(tx, document_id, owner, **values) == 1


async def blobs_in_use(connection: AsyncConnection, blobs: Sequence[str]) -> set[str]:
    """Which of these files belong to a document, whoever owns it: for the sweep of files nobody needs."""
    return set(await connection.scalars(select(documents.c.blob).where(documents.c.blob.in_(blobs))))


async def delete_document(tx: AsyncConnection, document_id: str, owner: str) -> bool:
    """Delete the document and everything made from it."""
    return (await tx.execute(delete(documents).where(_mine(document_id, owner)))).rowcount == 1


async def save_graph(tx: AsyncConnection, document_id: str, provider: str, made: ConceptGraph) -> None:
    await _replace(tx, graphs, document_id, provider, made.model_dump_json())


async def graph(connection: AsyncConnection, document_id: str, owner: str) -> ConceptGraph | None:
    data = await _data(connection, graphs, document_id, owner)
    from .providers.results import ConceptGraph

    return None if data is None else ConceptGraph.model_validate_json(data)


async def save_quiz(tx: AsyncConnection, document_id: str, provider: str, made: Quiz) -> None:
    await _replace(tx, quizzes, document_id, provider, made.model_dump_json())


async def quiz(connection: AsyncConnection, document_id: str, owner: str) -> Quiz | None:
    data = await _data(connection, quizzes, document_id, owner)
    from .providers.results import Quiz

    return None if data is None else Quiz.model_validate_json(data)


async def save_explanations(tx: AsyncConnection, document_id: str, provider: str, made: Sequence[Explanation]) -> None:
    await _replace(tx, explanation_sets, document_id, provider, _explanations().dump_json(list(made)).decode())


async def explanations(connection: AsyncConnection, document_id: str, owner: str) -> list[Explanation] | None:
    data = await _data(connection, explanation_sets, document_id, owner)
    return None if data is None else _explanations().validate_json(data)


@cache
def _explanations() -> TypeAdapter[list[Explanation]]:
    from pydantic import TypeAdapter

    from .providers.results import Explanation

    return TypeAdapter(list[Explanation])


async def unfinished_documents(connection: AsyncConnection, *, after: str, limit: int) -> list[Document]:
    """Anybody's documents that are neither finished nor rejected, by id; for the reconciliation."""
    through = select(explanation_sets.c.document_id)
    unfinished = and_(documents.c.id > after, documents.c.status != "rejected", documents.c.id.not_in(through))
    rows = await connection.execute(select(*_SUMMARY).where(unfinished).order_by(documents.c.id).limit(limit))
    return [Document(**row._mapping) for row in rows]


async def document_of_anybody(connection: AsyncConnection, document_id: str) -> Document | None:
    """For the operator's command line. Whatever answers users calls `document`, with the owner."""
    row = (await connection.execute(select(*_SUMMARY).where(documents.c.id == document_id))).first()
    return Document(**row._mapping) if row else None


async def save_reminder(tx: AsyncConnection, document_id: str, at: float) -> None:
    await tx.execute(insert(reminders).values(document_id=document_id, reminded_at=at))


def _mine(document_id: str, owner: str) -> ColumnElement[bool]:
    return and_(documents.c.id == document_id, documents.c.owner == owner)


async def _update(tx: AsyncConnection, document_id: str, owner: str, **values: object) -> int:
    done = await tx.execute(update(documents).where(_mine(document_id, owner)).values(updated_at=time.time(), **values))
    return done.rowcount


async def _replace(tx: AsyncConnection, table: Table, document_id: str, provider: str, data: str) -> None:
    await tx.execute(delete(table).where(table.c.document_id == document_id))
    await tx.execute(
        insert(table).values(document_id=document_id, provider=provider[:120], data=data, created_at=time.time())
    )


async def _data(connection: AsyncConnection, table: Table, document_id: str, owner: str) -> str | None:
    result: str | None = await connection.scalar(
        select(table.c.data).join(documents, documents.c.id == table.c.document_id).where(_mine(document_id, owner))
    )
    return result
