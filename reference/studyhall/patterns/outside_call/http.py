"""What an HTTP answer says about an effect, for the clients of httpx and httpx2.

    answer = await calls.once(key, lambda key: answer_of(http.post("/labels", json={"key": key, …})))

Promise: a request that never left is `NotMade`, 429 keeps to its Retry-After (seconds or a date), every other status
is judged by `check_status`, and a good answer is returned, as JSON where it is some. What breaks after the first byte
left is raised as it came: the provider may have carried it out.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from ..retry import parse_retry_after
from .ledger import NotMade, check_status

__all__ = ["answer_of"]

# Of httpx, by name: both packages have them, and neither is a dependency of this pattern.
_NEVER_LEFT = ("ConnectError", "ConnectTimeout", "PoolTimeout")


async def answer_of(request: Awaitable[Any]) -> Any:
    try:
        answer = await request
    except Exception as error:
        if type(error).__name__ in _NEVER_LEFT:
            raise NotMade(f"no connection: {type(error).__name__}") from error
        raise
    check_status(answer.status_code, parse_retry_after(answer.headers.get("retry-after"), time.time()))
    try:
        return answer.json()
    except ValueError:
        return answer.text
