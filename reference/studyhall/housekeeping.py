"""What StudyHall throws away, and when: rows and files that nobody needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from . import db
from .patterns import checkpoint, dead_letter, idempotency
from .patterns.claim_check import Blobs, SweptBlobs
from .patterns.core.store import read
from .patterns.deferred_reply import DeferredReplies
from .patterns.retention import DEFAULT, Retention
from .patterns.saga import store as saga_store

__all__ = ["Cleaned", "clean_up"]

SAGAS_KEPT = 60 * 24 * 3600.0  # seconds after its end; as long as the markers of jobs
CHAT_KEPT = 24 * 3600.0  # seconds after the end of its token for which a chat command is remembered


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Rows and files that were deleted."""

    markers: int
    letters: int
    checkpoints: int
    chat_replies: int
    files: SweptBlobs
    sagas: int

    def numbers(self) -> dict[str, int]:
        """For a result, a log line or a table."""
        rows = {k: v for k, v in asdict(self).items() if k != "files"}
        return {**rows, **{f"files_{name}": n for name, n in asdict(self.files).items()}}


async def clean_up(
    store: AsyncEngine, blob_dir: Path, *, kept: Retention = DEFAULT, grace: float = 3600.0
) -> Cleaned:
    """Purge what is past its retention, and files of documents that are gone. Safe to run twice at once."""

    async def in_use(blobs: Sequence[str]) -> set[str]:
        async with read(store) as connection:
            return await db.blobs_in_use(connection, blobs)

    return Cleaned(
        await idempotency.purge(store, kept.markers_age),
        await dead_letter.purge(store, kept.letters_age),
        await checkpoint.purge(store, kept.checkpoints_age),
        await DeferredReplies(store).purge(CHAT_KEPT),
        await Blobs(blob_dir).sweep("documents", in_use, grace=grace),
        await _forget_sagas(store),
    )


async def _forget_sagas(store: AsyncEngine) -> int:
    gone = 0
    while batch := await saga_store.purge(store, SAGAS_KEPT):  # short transactions, until nothing is left
        gone += batch
    return gone
