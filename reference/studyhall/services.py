"""What handlers get from the outside: `ctx.services`. Built once per worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .db import Document
from .documents import Missing
from .patterns.claim_check import BlobDamaged, BlobMissing, Blobs, Claim
from .patterns.deferred_reply import DeferredReplies, InteractionWebhook
from .providers import AIProvider

if TYPE_CHECKING:  # it enqueues flows of the jobs that use these services
    from .maintenance import Maintenance

__all__ = ["Chat", "Pool", "Services"]

T = TypeVar("T")
GONE = "The uploaded file is no longer there, or was damaged. Upload it again."


class Pool(Protocol):
    """Runs CPU-bound or risky functions in processes that can be killed (`patterns/isolation/pool.py`)."""

    async def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        memory_limit: int | None = None,
    ) -> T: ...


@dataclass(frozen=True, slots=True)
class Chat:
    """How answers get to the chat platform."""

    replies: DeferredReplies
    webhook: InteractionWebhook


@dataclass(frozen=True, slots=True)
class Services:
    provider: AIProvider
    pool: Pool
    blob_dir: Path
    max_document_bytes: int = 50 * 1024 * 1024
    maintenance: Maintenance | None = None  # for the scheduled jobs
    chat: Chat | None = None  # for answers to chat commands

    async def upload(self, document: Document) -> Path:
        """Where the document's file lies. One that is gone or is not what was uploaded is refused."""
        path = (self.blob_dir / document.blob).resolve()
        if not path.is_relative_to(self.blob_dir.resolve()):
            raise Missing(GONE)
        if document.sha256 is None:
            return path
        claim = Claim(ref=document.blob, size=document.size, sha256=document.sha256)
        try:
            return await Blobs(self.blob_dir).fetch(claim)
        except (BlobMissing, BlobDamaged) as error:
            raise Missing(GONE) from error
