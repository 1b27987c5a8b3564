"""Sends the answers of `deferred_reply`: edits the "thinking…" message, adds more messages after it.

Promise: every failure is one of our errors. 429 is `RateLimited` with the platform's own wait, 5xx and
broken connections are `Transient`, an ended token is `TokenEnded`, an unknown one `TokenUnknown`, a message that is
refused is `Permanent`. On Discord no answer can ping anybody. The token is part of the address, so no address is ever
logged or put into an error.

When it does NOT hold: a message that timed out may have arrived. Editing again is harmless, a follow-up is not.
"""

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..core.errors import Permanent, RateLimited, Transient
from ..core.job import DAY
from .replies import DISCORD, TokenEnded, TokenUnknown

if TYPE_CHECKING:
    import httpx2

__all__ = ["InteractionWebhook", "TokenEnded"]

# They log each request's whole address at INFO, and the token is in it.
logging.getLogger("httpx2").setLevel(logging.WARNING)
logging.getLogger("httpcore2").setLevel(logging.WARNING)


class InteractionWebhook:
    """`async with` it, or `close` it at the end."""

    def __init__(self, base_url: str, *, timeout: float = 10.0, fields: Mapping[str, Any] = DISCORD) -> None:
        """`fields` go into every message beside its `content`: {} for platforms other than Discord."""
        import httpx2  # only processes that answer need it

        self._base, self._fields = base_url.rstrip("/"), fields
        self._client = httpx2.AsyncClient(timeout=timeout, follow_redirects=False)

    async def edit(self, application_id: str, token: str, text: str) -> None:
        await self._send("PATCH", application_id, token, "/messages/@original", text)

    async def follow_up(self, application_id: str, token: str, text: str) -> None:
        await self._send("POST", application_id, token, "", text)

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, method: str, application_id: str, token: str, path: str, text: str) -> None:
        import httpx2

        url = f"{self._base}/webhooks/{quote(application_id, safe='')}/{quote(token, safe='')}{path}"
        body = {"content": text, **self._fields}
        try:
            response = await self._client.request(method, url, json=body)
        except httpx2.HTTPError as error:
            raise Transient(f"the chat platform cannot be reached ({type(error).__name__})") from None
        status = response.status_code
        if status == 429:
            raise RateLimited("the chat platform asks us to wait", retry_after=_wait(response))
        if status == 404:
            raise TokenUnknown(f"{status}: {TokenUnknown.__doc__}")
        if status in (401, 403):
            raise TokenEnded(f"{status}: {TokenEnded.__doc__}")
        if status >= 500:
            raise Transient(f"the chat platform answered {status}")
        if status >= 300:
            raise Permanent(f"the chat platform refused the message ({status})")


def _wait(response: "httpx2.Response") -> float:
    """Seconds: the body is exact, the header is rounded up."""
    try:
        body: Any = response.json()
        wait = float(body["retry_after"])
    except (ValueError, LookupError, TypeError):
        try:
            wait = float(response.headers.get("retry-after", "1"))
        except ValueError:
            wait = 1.0
    return min(DAY, max(0.05, wait)) if math.isfinite(wait) else 1.0
