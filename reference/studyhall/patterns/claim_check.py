"""Jobs carry references, not bulk: large data is stored outside the queue and fetched by the worker.

Promise: a payload over the limit is refused where it is made (`PayloadTooLarge`), so Redis holds small jobs
only. A stored blob is there, whole, before its `Claim` can be sent, and is checked against size and SHA-256
when it is fetched. Blobs whose owner (a job, a row) is gone are deleted by `sweep`; a blob of a living owner
never is, whenever a process is killed: the blob is written before its owner, and blobs younger than `grace` are
kept. A crash in between leaves garbage for the next sweep, never a claim without its blob.

It does not hold when a producer takes longer than `grace` from `put` to its owner, nor when workers do not
see the producers' folder: on several machines use a shared folder, or an object store behind the same calls.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field
from redis.asyncio import Redis

from .core.execution import CallNext, JobContext, Step, before
from .core.failures import Permanent
from .core.plain_json import dumps
from .core.request import AddNext, AddStep, Outgoing

__all__ = [
    "BlobDamaged",
    "BlobMissing",
    "BlobTooLarge",
    "Blobs",
    "Claim",
    "Owner",
    "PayloadTooLarge",
    "SweptBlobs",
    "check_size",
    "max_payload",
    "needed_by_jobs",
    "small",
]

MAX_PAYLOAD = 64 * 1024  # bytes of a job's data as JSON
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_CHUNK = 1024 * 1024

Owner = tuple[str, str]  # (kind, id): ("documents", document id), or (queue, job id)
InUse = Callable[[Sequence[str]], Awaitable[Collection[str]]]  # of these references, those still needed


class PayloadTooLarge(Permanent):
    """The payload does not belong in the queue. Store it with `Blobs.put` and send the claim instead."""


class BlobTooLarge(Permanent):
    """The blob is larger than this store takes."""


class BlobMissing(Permanent):
    """The blob is not there: swept because its owner was gone, or this machine does not see the folder."""


class BlobDamaged(Permanent):
    """The blob is not what was stored: its size or its SHA-256 differs. Store it again."""


class Claim(BaseModel):
    """What travels in the job instead of the data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ref: Annotated[str, Field(max_length=500)]
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def check_size(data: Any, limit: int = MAX_PAYLOAD) -> None:
    """Raise `PayloadTooLarge` when `data` is longer than `limit` bytes of JSON, `NotJson` if it cannot be JSON."""
    _check_text(dumps(data), limit)


def _check_text(text: str, limit: int) -> None:
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit:
        raise PayloadTooLarge(f"{size:,} bytes, the limit is {limit:,}. {PayloadTooLarge.__doc__}")


@dataclass(frozen=True, slots=True)
class SweptBlobs:
    kept: int = 0
    deleted: int = 0
    freed: int = 0  # bytes


class Blobs:
    """Blobs in a folder: `<kind>/<owner>/<random name>`. A name is used once, so nothing is ever overwritten."""

    def __init__(self, folder: Path, *, max_bytes: int = 1024**3) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    async def put(self, source: bytes | Path, owner: Owner) -> Claim:
        """Store it for `owner`; add the owner after this returns."""
        return await asyncio.to_thread(self._put, source, owner)

    async def fetch(self, claim: Claim) -> Path:
        """The blob's path, after a check against the claim."""
        return await asyncio.to_thread(self._verified, claim)

    async def read(self, claim: Claim) -> bytes:
        return await asyncio.to_thread(lambda: self._verified(claim).read_bytes())

    async def sweep(self, kind: str, in_use: InUse, *, grace: float = 3600.0, page: int = 500) -> SweptBlobs:
        """Delete blobs of this `kind` that are older than `grace` seconds and not in use. Run it anywhere,
        any number of times; when `in_use` raises (Redis is away), nothing is deleted."""
        kept = deleted = freed = 0
        owners = await asyncio.to_thread(lambda: [path.name for path in _folders(self._folder / kind)])
        for start in range(0, len(owners), page):
            # Age first, then use: a blob that gets its owner in between is young, and kept.
            batch = [(kind, owner) for owner in owners[start : start + page]]
            old = await asyncio.to_thread(self._older_than, batch, time.time() - grace)
            needed = set(await in_use(list(old))) if old else set()
            for ref, path in old.items():
                if ref in needed:
                    kept += 1
                    continue
                freed += await asyncio.to_thread(_delete, path)
                deleted += 1
        return SweptBlobs(kept, deleted, freed)

    def _put(self, source: bytes | Path, owner: Owner) -> Claim:
        if not all(_NAME.fullmatch(part) for part in owner):
            raise ValueError(f"owner {owner!r}: letters, digits, '.', '_' and '-' only")
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        if size > self._max_bytes:
            raise BlobTooLarge(f"{size:,} bytes, the limit is {self._max_bytes:,}. {BlobTooLarge.__doc__}")
        folder = self._folder.joinpath(*owner)
        name = uuid.uuid4().hex
        part = folder / f"{name}.part"
        with _create(part) as out:
            if isinstance(source, bytes):
                out.write(source)
            else:
                with source.open("rb") as opened:
                    shutil.copyfileobj(opened, out, _CHUNK)
            out.flush()
            os.fsync(out.fileno())  # the job may outlive a power cut, so must this
        size, digest = part.stat().st_size, _digest(part)
        part.replace(folder / name)  # whole or not there
        return Claim(ref=f"{owner[0]}/{owner[1]}/{name}", size=size, sha256=digest)

    def _verified(self, claim: Claim) -> Path:
        parts = claim.ref.split("/")
        if len(parts) != 3 or not all(_NAME.fullmatch(part) for part in parts):
            raise BlobMissing(f"{claim.ref!r} is not a reference of ours. {BlobMissing.__doc__}")
        path = self._folder.joinpath(*parts)
        try:
            if path.stat().st_size != claim.size or _digest(path) != claim.sha256:
                raise BlobDamaged(f"{claim.ref}: {BlobDamaged.__doc__}")
        except FileNotFoundError:
            raise BlobMissing(f"{claim.ref}: {BlobMissing.__doc__}") from None
        return path

    def _older_than(self, owners: Sequence[Owner], then: float) -> dict[str, Path]:
        old: dict[str, Path] = {}
        for kind, owner in owners:
            folder = self._folder / kind / owner
            with contextlib.suppress(FileNotFoundError):
                paths = [path for path in folder.iterdir() if path.stat().st_mtime < then]
                old |= {f"{kind}/{owner}/{path.name}": path for path in paths}
                if not paths and folder.stat().st_mtime < then:
                    with contextlib.suppress(OSError):
                        folder.rmdir()  # fails if a blob is in it
        return old


def needed_by_jobs(redis: Redis, *others: InUse, prefix: str = "bull") -> InUse:
    """For blobs owned by jobs (kind: the queue): kept while the job is in Redis or one of `others` needs it. Those are
    asked after Redis, the way jobs move: `dead_letter.needed_by_dead_letters(store)`."""

    async def in_use(refs: Sequence[str]) -> set[str]:
        owners = {ref: (ref.split("/")[0], ref.split("/")[1]) for ref in refs}
        async with redis.pipeline(transaction=False) as pipe:
            for queue, ident in owners.values():
                pipe.exists(f"{prefix}:{queue}:{ident}")
            exists = await pipe.execute()
        needed = {ref for ref, present in zip(refs, exists, strict=True) if present}
        for other in others:
            needed |= set(await other(refs))
        return needed

    return in_use


def max_payload(limit: int = MAX_PAYLOAD) -> Step:
    """Refuse oversized jobs of foreign producers."""

    @before("payload")
    def max_payload(run: JobContext, call_next: CallNext) -> Awaitable[Any]:
        if (text := run.text) is None:
            check_size(run.job.data, limit)
        else:
            _check_text(text, limit)
        return call_next(run)

    return max_payload


def small(limit: int = MAX_PAYLOAD) -> AddStep:
    """For a producer: refuse what does not belong in the queue. After `signing` it has nothing to encode."""

    async def small(jobs: Sequence[Outgoing], call_next: AddNext) -> None:
        for job in jobs:
            data, text = job.sealed
            _check_text(text if data is job.data else dumps(job.data), limit)
        await call_next()

    return small


def _create(path: Path) -> BinaryIO:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a sweep removed the empty folder
            return path.open("xb")


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _digest(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _delete(path: Path) -> int:
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:  # another sweep was faster
        return 0
    return size
