"""The same request twice is one request: `Idempotency-Key` at the edge, a business key behind it.

Promise: of all requests with one key exactly one takes effect, and every repeat, now or tomorrow, on this
instance or another, gets the first one's answer. A request that failed stored no answer, so its retry is run,
under the same id: what the first try left half done is finished, not duplicated. The same key with another body is
`KeyReused` (HTTP 422), even while the first is still running.

A `SET NX` window of five seconds does the opposite: it refuses the retry of a request that failed within it, and
runs the retry of one that succeeded after it.

It holds if `work(id)` is idempotent by that id: use it as the row's key and the job's key. It does not hold
beyond `purge` (keep keys for as long as clients retry, a day at least), and not for requests without a key: each
of those is a new one, unless the business has a natural key for it (`business_key`), which is better still.
"""

import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from .core.failures import Permanent
from .idempotency import Inbox, KeyReused, fingerprint

__all__ = ["Answer", "InvalidRequestKey", "KeyReused", "RequestDedup", "business_key"]

_KEY = re.compile(r"[\x21-\x7e]{1,200}")  # visible ASCII, as a header can carry it


class InvalidRequestKey(Permanent):
    """An Idempotency-Key is 1 to 200 visible ASCII characters, for example a UUID made by the client."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`value` is what `work` returned, first or long ago (`replayed`)."""

    value: Any
    replayed: bool


def business_key(*parts: object) -> str:
    """A key from what makes the request unique in the business: `business_key("refund", order_id)`."""
    return fingerprint([str(part) for part in parts])


class RequestDedup:
    """One per kind of request: the same key for an upload and for an order are two requests."""

    def __init__(self, store: AsyncEngine, kind: str) -> None:
        self._inbox = Inbox(store, f"requests/{kind}")

    async def run(self, caller: str, key: str | None, body: object, work: Callable[[str], Awaitable[Any]]) -> Answer:
        """`work(id)` once per caller and key. `body`: JSON values that name the contents, a digest for files."""
        if key is None:
            return Answer(await work(uuid.uuid4().hex), replayed=False)
        if not _KEY.fullmatch(key):
            raise InvalidRequestKey(str(InvalidRequestKey.__doc__))
        name, print_ = business_key(caller, key), fingerprint(body)
        if stored := await self._inbox.seen(f"{name}/answer", print_):
            return Answer(stored.result, replayed=True)
        # Claimed before the work: a repeat that comes meanwhile works under the same id, and the same key with
        # another body is refused here. The first id recorded stands, on every instance.
        ident = await self._inbox.record(f"{name}/id", print_, uuid.uuid4().hex)
        answer = await work(ident)
        return Answer(await self._inbox.record(f"{name}/answer", print_, answer), replayed=False)

    async def purge(self, older_than: float) -> int:
        """Forget requests older than this many seconds."""
        return await self._inbox.purge(older_than)
