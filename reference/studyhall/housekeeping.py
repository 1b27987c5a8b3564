"""What StudyHall throws away, and when: rows and files that nobody needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from . import db
from .patterns import retention, saga_store
from .patterns.claim_check import Blobs, SweptBlobs
from .patterns.deferred_reply import DeferredReplies
from .patterns.store import read

__all__ = ["Cleaned", "clean_up"]

SAGAS_KEPT = 60 * 24 * 3600.0  # seconds after its end; as long as the markers of jobs
CHAT_KEPT = 24 * 3600.0  # seconds after the end of its token for which a chat command is remembered


@dataclass(frozen=True, slots=True)
class Cleaned:
    rows: retention.Purged
    files: SweptBlobs
    chat_replies: int = 0
    sagas: int = 0

    def numbers(self) -> dict[str, int]:
        """For a result, a log line or a table."""
        files = {f"files_{name}": n for name, n in asdict(self.files).items()}
        return {**asdict(self.rows), **files, "chat_replies": self.chat_replies, "sagas": self.sagas}


async def clean_up(store: AsyncEngine, blob_dir: Path, *, grace: float = 3600.0) -> Cleaned:
    """Purge what is past its retention, and files of documents that are gone. Safe to run twice at once."""

    async def in_use(blobs: Sequence[str]) -> set[str]:
        async with read(store) as connection:
            return await db.blobs_in_use(connection, blobs)

    return Cleaned(
        await retention.purge(store),
        await Blobs(blob_dir).sweep("documents", in_use, grace=grace),
        await DeferredReplies(store).purge(CHAT_KEPT),
        await _forget_sagas(store),
    )


async def _forget_sagas(store: AsyncEngine) -> int:
    gone = 0
    while batch := await saga_store.purge(store, SAGAS_KEPT):  # short transactions, until nothing is left
        gone += batch
    return gone
