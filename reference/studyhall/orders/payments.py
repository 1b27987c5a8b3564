"""Client of the payment provider: every call has a key, a time limit, and errors that say what to do next."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import httpx2

from studyhall.patterns.core.errors import Permanent, RateLimited, Transient
from studyhall.patterns.retry import parse_retry_after


class Declined(Permanent):
    """The provider refused this payment for good."""


class OutcomeUnknown(Transient):
    """No answer came. The provider may have done it: look it up or undo it by the same key."""


class Payments:
    """`async with Payments(url) as payments`. Money is in cents; keys come from the saga."""

    def __init__(self, url: str, *, timeout: float = 5.0) -> None:
        # No retries in here: the saga retries, and loops inside loops multiply.
        self._http = httpx2.AsyncClient(base_url=url, timeout=timeout)

    async def __aenter__(self) -> Payments:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def charge(self, key: str, *, amount: int, customer: str, method: str) -> dict[str, Any]:
        body = {"amount": amount, "currency": "EUR", "customer": customer, "method": method}
        return await self._call("POST", "/v1/charges", key, json=body)

    async def refund(self, key: str, *, charge_key: str) -> dict[str, Any]:
        """Give the money back. A charge that never arrived is voided: if it comes later, it is refused."""
        return await self._call("POST", "/v1/refunds", key, json={"charge_key": charge_key})

    async def find(self, charge_key: str) -> dict[str, Any] | None:
        """The charge made under this key, None when there is none."""
        return await self._call("GET", "/v1/charges", params={"key": charge_key}, absent=404) or None

    async def _call(self, method: str, path: str, key: str = "", *, absent: int = 0, **content: Any) -> dict[str, Any]:
        headers = {"Idempotency-Key": key} if key else {}
        try:
            answer = await self._http.request(method, path, headers=headers, **content)
            # A proxy's answer may have any shape, or none: the status and its header say enough.
            body = {} if answer.status_code == 429 else answer.json()
        except httpx2.ConnectError as error:
            raise Transient(f"payment provider not reached: {error}") from error
        except (httpx2.HTTPError, ValueError) as error:
            raise OutcomeUnknown(f"{OutcomeUnknown.__doc__} ({type(error).__name__})") from error
        if answer.status_code in (200, 201):
            return dict(body)
        if answer.status_code == absent:
            return {}
        raise _mapped(answer, body if isinstance(body, dict) else {})


def _mapped(answer: httpx2.Response, body: dict[str, Any]) -> Exception:
    error = body.get("error")
    detail = error if isinstance(error, dict) else {"message": error or ""}
    reason = f"payment provider: {answer.status_code} {detail.get('code', '')}: {detail.get('message', '')}"
    if answer.status_code == 429:
        wait = parse_retry_after(answer.headers.get("Retry-After"), time.time())
        return RateLimited(reason, retry_after=1.0 if wait is None else wait)
    if answer.status_code >= 500 or answer.status_code in (408, 425):
        return Transient(reason)
    return Declined(reason) if answer.status_code == 402 else Permanent(reason)
