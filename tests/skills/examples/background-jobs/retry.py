import httpx2 as httpx

# [use]
import time

from patterns.core.errors import Permanent, RateLimited, Transient
from patterns.retry import parse_retry_after


def check(response) -> None:
    """Turn an HTTP answer into the error class that decides. Never retry in here."""
    status = response.status_code
    if status == 429 or (status == 503 and "retry-after" in response.headers):
        wait = parse_retry_after(response.headers.get("retry-after"), time.time())
        # Consumes no attempt.
        raise RateLimited(f"HTTP {status}", retry_after=wait if wait is not None else 5.0)
    if status in (408, 425) or status >= 500:
        raise Transient(f"HTTP {status}")
    if status >= 400:
        raise Permanent(f"HTTP {status}")


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    from patterns.core.job import Outcome, RetryPolicy
    from patterns.retry import decide

    seen = {}
    for status, headers in [(200, {}), (429, {"retry-after": "7"}), (500, {}), (404, {})]:
        try:
            check(httpx.Response(status, headers=headers))
        except Exception as error:
            seen[status] = decide(error, RetryPolicy(attempts=3), 0)
    assert {status: decision.outcome for status, decision in seen.items()} == {
        429: Outcome.SNOOZED,
        500: Outcome.RETRY,
        404: Outcome.PERMANENT,
    }
    assert seen[429].delay >= 7
    assert not seen[429].consume_attempt
