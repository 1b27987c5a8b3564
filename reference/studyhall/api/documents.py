"""Upload a document, follow it, stop it."""

import hashlib
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response, UploadFile
from fastapi import Path as InPath
from pydantic import BaseModel, Field

from studyhall import cancellations, db
from studyhall.documents import TooLarge
from studyhall.documents.detect import detect
from studyhall.jobs import STAGES
from studyhall.jobs.reference import UnknownDocument
from studyhall.patterns.core.errors import Cancelled, QueueUnavailable
from studyhall.patterns.core.redaction import redact_text
from studyhall.patterns.core.store import read
from studyhall.patterns.job_ids import job_id
from studyhall.patterns.producer import JobRef
from studyhall.patterns.wait_for_result import JobFailed, JobUnknown, StillRunning
from studyhall.providers.results import ConceptGraph, Explanation, Quiz
from studyhall.stages import StageState
from studyhall.submissions import states, submit

from .state import Api, ApiState, Caller, RequestKey

router = APIRouter(prefix="/documents", tags=["documents"])
CHUNK = 64 * 1024
MAX_WAIT = 25.0
DocumentId = Annotated[str, InPath(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
PREFER = re.compile(r"(?:^|[,;\s])wait=(\d{1,3})(?:$|[,;\s])")


class Stage(BaseModel):
    """One stage of a document's flow. `state` is BullMQ's, or `unknown` while Redis is away."""

    name: str
    queue: str
    job_id: str
    state: str
    percent: float
    message: str


class DocumentView(BaseModel):
    id: str
    name: str
    status: Annotated[str, Field(description="uploaded, ready or rejected")]
    size: int
    kind: str | None
    title: str | None
    pages: int | None
    error: str | None
    created_at: float
    updated_at: float
    stages: list[Stage]


class DocumentDetail(DocumentView):
    graph: ConceptGraph | None = None
    quiz: Quiz | None = None
    explanations: list[Explanation] | None = None


class UploadAccepted(BaseModel):
    id: str
    href: str


class Reason(BaseModel):
    reason: Annotated[str, Field(max_length=500)] = "asked for by its owner"


class Stopped(BaseModel):
    queue: str
    job_id: str
    state: Annotated[str, Field(description="cancelled, stopping or too-late")]
    reason: str


@router.post("", status_code=202)
async def upload(
    api: Api,
    caller: Caller,
    response: Response,
    file: UploadFile,
    key: RequestKey = None,
    prefer: Annotated[str | None, Header(max_length=200, description="`wait=10`: answer 201 if done by then")] = None,
) -> UploadAccepted:
    """Take a PDF, DOCX, Markdown or text file; its bytes decide the type, not its name.

    202 with its id as soon as it is safe on disk and in the database, even while Redis is away.
    """
    with tempfile.TemporaryDirectory(prefix="upload-") as folder:
        path, digest = await _received(file, Path(folder), api.app.settings.max_document_bytes)
        name = _shown(file.filename or "document")

        async def work(ident: str) -> dict[str, Any]:
            return {"id": await submit(api.app, path, caller, name=name, document_id=ident)}

        answer = await api.uploads.run(caller, key, {"sha256": digest, "name": name}, work)
    accepted = UploadAccepted(id=answer.value["id"], href=f"/documents/{answer.value['id']}")
    if answer.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    response.headers["Location"] = accepted.href
    if (match := PREFER.search(prefer or "")) and await _through(api, accepted.id, min(MAX_WAIT, float(match[1]))):
        response.status_code = 201
        response.headers["Preference-Applied"] = f"wait={match[1]}"
    return accepted


@router.get("")
async def list_documents(
    api: Api, caller: Caller, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> list[DocumentView]:
    """The caller's documents, newest first."""
    async with read(api.app.store) as connection:
        documents = await db.documents_of(connection, caller, limit=limit)
    stages = await _stages(api, *(document.id for document in documents))
    return [DocumentView(**_fields(document), stages=stages[document.id]) for document in documents]


@router.get("/{document_id}")
async def show_document(api: Api, caller: Caller, document_id: DocumentId) -> DocumentDetail:
    """One document: its stages and its results so far."""
    async with read(api.app.store) as connection:
        if await db.document(connection, document_id, caller) is None:
            raise UnknownDocument("You have no such document.")
    # The stages first: when one is shown as completed, its result is there.
    stages = (await _stages(api, document_id))[document_id]
    async with read(api.app.store) as connection:
        document = await db.document(connection, document_id, caller)
        if document is None:
            raise UnknownDocument("You have no such document.")
        results = {
            "graph": await db.graph(connection, document_id, caller),
            "quiz": await db.quiz(connection, document_id, caller),
            "explanations": await db.explanations(connection, document_id, caller),
        }
    return DocumentDetail(**_fields(document), stages=stages, **results)  # type: ignore[arg-type]


@router.post("/{document_id}/cancel")
async def cancel_document(
    api: Api, caller: Caller, document_id: DocumentId, why: Reason | None = None
) -> list[Stopped]:
    """Stop the flow. What is done stays."""
    async with read(api.app.store) as connection:
        if await db.document(connection, document_id, caller) is None:
            raise UnknownDocument("You have no such document.")
    async with api.app.producer.bounded():
        stopped = await cancellations.cancel_document(api.app, document_id, (why or Reason()).reason)
    return [Stopped(queue=s.queue, job_id=s.job_id, state=s.state, reason=s.reason) for s in stopped]


async def _received(file: UploadFile, folder: Path, limit: int) -> tuple[Path, str]:
    path, digest, size = folder / "upload", hashlib.sha256(), 0
    with path.open("w+b") as out:
        while piece := await file.read(CHUNK):
            size += len(piece)
            if size > limit:
                raise TooLarge(f"The file is larger than {limit:,} bytes.")
            digest.update(piece)
            out.write(piece)
        detect(out)
    return path, digest.hexdigest()


def _shown(name: str) -> str:
    """The last part of the name, for people to read. No file is ever opened by it."""
    return re.split(r"[/\\]", name)[-1].strip()[:255] or "document"


def _fields(document: db.Document) -> dict[str, Any]:
    return {name: getattr(document, name) for name in DocumentView.model_fields if name != "stages"}


async def _stages(api: ApiState, *document_ids: str) -> dict[str, list[Stage]]:
    """By document. All within one time limit: with Redis away a list of twenty must not wait twenty times."""
    stages_of: dict[str, list[StageState]] = {}
    try:
        async with api.app.producer.bounded():
            for ident in document_ids:
                stages_of[ident] = await states(api.app, ident)
    except QueueUnavailable:
        pass
    unknown = [StageState(name, "unknown", 0.0, "") for name in STAGES]
    return {
        ident: [
            Stage(
                name=stage.name,
                queue=api.app.jobs[stage.name].queue,
                job_id=job_id(stage.name, ident),
                state=stage.state,
                percent=stage.percent,
                message=redact_text(stage.message),
            )
            for stage in stages_of.get(ident, unknown)
        ]
        for ident in document_ids
    }


def _last_stage(api: ApiState, document_id: str) -> JobRef:
    name = STAGES[-1]
    return JobRef(api.app.jobs[name].queue, name, job_id(name, document_id), document_id)


async def _through(api: ApiState, document_id: str, seconds: float) -> bool:
    try:
        await api.results.wait(_last_stage(api, document_id), timeout=seconds)
    except (StillRunning, JobFailed, JobUnknown, Cancelled):
        return False
    return True
