"""What an HTTP answer says about an effect.

    buy = lambda key: answer_of(http.post("/labels", json=…, headers={"Idempotency-Key": key}))      # httpx, httpx2
    answer = await calls.once(key, buy)
    buy = lambda key: sync_answer_of(lambda: requests.post(…, timeout=20))      # requests, httpx.Client: no event loop

Promise: a request that never left is `NotMade`, 429 keeps to its Retry-After (seconds or a date), every other status
is judged by `check_status`, and a good answer is returned, parsed if it is JSON. An error after the first byte
left is raised unchanged: the provider may have carried it out. `answered` judges the answer of any other client.
Does not hold for a client that repeats requests by itself: only its last try is seen.
"""

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..retry import parse_retry_after
from .ledger import NotMade, check_status

__all__ = ["answer_of", "answered", "sync_answer_of"]

# By name: no client is a dependency of this pattern. First httpx, then urllib3 (requests), then Python itself.
_NEVER_LEFT = {"ConnectError", "ConnectTimeout", "PoolTimeout", "NewConnectionError", "NameResolutionError"}
_NEVER_LEFT |= {"ConnectTimeoutError", "ConnectionRefusedError", "gaierror"}


async def answer_of(request: Awaitable[Any]) -> Any:
    try:
        answer = await request
    except Exception as error:
        _check_left(error)
        raise
    return answered(answer.status_code, answer.headers, answer.text)


def sync_answer_of(request: Callable[[], Any]) -> Any:
    try:
        answer = request()
    except Exception as error:
        _check_left(error)
        raise
    return answered(answer.status_code, answer.headers, answer.text)


def answered(status: int, headers: Any, body: str) -> Any:
    """The good answer, or raises what the status means. `headers.get` must ignore case."""
    check_status(status, parse_retry_after(headers.get("retry-after"), time.time()))
    try:
        return json.loads(body)
    except ValueError:
        return body


def _check_left(error: Exception) -> None:
    """`requests` and urllib wrap the reason: their ConnectionError alone may also be an answer that was cut off."""
    wrapped = [error, *error.args[:1]]
    names = {type(cause).__name__ for cause in (*wrapped, *(getattr(cause, "reason", None) for cause in wrapped))}
    if names & _NEVER_LEFT:
        raise NotMade(f"no connection: {min(names & _NEVER_LEFT)}") from error
