"""`POST /interactions`: the chat platform calls us here. Verified, acknowledged at once, answered by a job."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request

from studyhall.patterns.deferred_reply import PONG, NotSigned, message, parse, verify
from studyhall.patterns.producer import JobRequest

from .problems import Problem
from .state import Api

router = APIRouter(tags=["chat"])
IDENT = re.compile(r"[A-Za-z0-9_-]{1,100}")
BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object", "description": "an interaction, signed"}}},
    }
}


@router.post("/interactions", openapi_extra=BODY, responses={401: {"description": "not signed by the platform"}})
async def interaction(
    api: Api,
    request: Request,
    signature: Annotated[str, Header(alias="X-Signature-Ed25519", max_length=200)] = "",
    timestamp: Annotated[str, Header(alias="X-Signature-Timestamp", max_length=50)] = "",
) -> dict[str, Any]:
    """Discord's protocol: Ed25519 over timestamp and body, PING, and `/ask question:…`, answered within minutes."""
    settings = api.app.settings
    if not settings.chat_public_key:
        raise Problem(403, "chat-off", "Chat is off. Set STUDYHALL_CHAT_PUBLIC_KEY and restart to turn it on.")
    body = await request.body()
    try:
        verify(settings.chat_public_key, signature, timestamp, body)
    except NotSigned as refused:
        raise Problem(401, "not-signed", str(refused)) from None
    received = parse(body)
    if received is None:
        return PONG
    question = str(received.options.get("question") or "").strip()
    if received.command != "ask" or not question or not IDENT.fullmatch(received.id):
        return message("I know one command: /ask question:…")
    job = JobRequest(
        "answer-question",
        {"interaction_id": received.id, "owner": settings.chat_owner, "question": question[:1_000]},
        key=received.id,
        priority="high",  # somebody is looking at "thinking…"
    )
    return await api.replies.accept(received, lambda: api.app.producer.enqueue(job))
