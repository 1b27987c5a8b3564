"""The services of the handlers, `ctx.services`. Built once per worker process."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .db import Document
from .documents import Missing
from .patterns.claim_check import BlobDamaged, BlobMissing, Blobs, Claim
from .patterns.core.errors import ResourceBusy
from .patterns.deadline import uncharged
from .patterns.deferred_reply import DeferredReplies, InteractionWebhook
from .providers import AIProvider

if TYPE_CHECKING:  # it enqueues flows of the jobs that use these services
    from .maintenance import Maintenance

T = TypeVar("T")
GONE = "The uploaded file is no longer there, or was damaged. Upload it again."


class Pool(Protocol):
    """Runs CPU-bound or risky functions in processes that can be killed (`patterns/isolation/pool.py`)."""

    async def run(
        self, fn: Callable[..., T], *args: Any, timeout: float | None = None, memory_limit: int | None = None
    ) -> T: ...


class Shares:
    """How many processes of the pool one owner may have at once, so that one's slow files leave room for others'.

    Whoever waits longer than `patience` goes back into the queue, consuming no attempt: a job that waits in the
    worker holds one of its places, and twenty of them would keep everybody else out.
    """

    def __init__(self, each: int = 1, patience: float = 1.0) -> None:
        self._each, self._patience = each, patience
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._asked: Counter[str] = Counter()

    @asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(owner, asyncio.Semaphore(self._each))
        self._asked[owner] += 1
        try:
            try:
                with uncharged():
                    async with asyncio.timeout(self._patience):
                        await turn.acquire()
            except TimeoutError:
                raise ResourceBusy(
                    "other files of this owner are being read", retry_after=1 + random.random()
                ) from None
            try:
                yield
            finally:
                turn.release()
        finally:
            self._asked[owner] -= 1
            if not self._asked[owner]:
                del self._asked[owner], self._turns[owner]


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
    shares: Shares = field(default_factory=Shares)

    async def upload(self, document: Document) -> Path:
        """The path of the document's file. Refuses one that is gone or not what was uploaded."""
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
