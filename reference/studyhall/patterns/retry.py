"""Retry with full jitter: one place decides what happens after an error.

Promise: the class of the error decides, never its text. The delay after the nth failure is
`random() * min(cap, base * 2**n)`, a Retry-After is never undercut, and waiting that is nobody's fault (rate
limit, busy resource, snooze) consumes no attempt. All of it ends: attempts by `attempts`, waiting by `max_age` and
`max_waits`. `surviving(seconds)` bridges an outage of one provider, `forever()` is for events.
The exception is `Unavailable`: an outage that hits every job alike consumes no attempt and no `max_age`, for
otherwise it would empty the whole queue into the dead letters. Its delays grow to `OUTAGE_CAP`.

Does not hold when the handler retries inside itself as well: loops multiply (3 inside 3 make 9 calls), so let
the error escape and be decided here. Jitter spreads a herd, it does not make a provider bigger: limit
concurrency too.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC
from email.utils import parsedate_to_datetime

from .core.errors import (
    Cancelled,
    FailPermanently,
    Permanent,
    RateLimited,
    ResourceBusy,
    RetryLater,
    Snooze,
    Unavailable,
    describe,
)
from .core.job import DAY, Decision, Outcome, RetryPolicy

__all__ = [
    "AI",
    "DEFAULT",
    "DOCUMENTS",
    "Decision",
    "Outcome",
    "RetryPolicy",
    "decide",
    "forever",
    "full_jitter",
    "parse_retry_after",
    "surviving",
]

SHORTEST_WAIT = 0.1  # "Retry-After: 0" consumes no attempt: without a floor it would be a hot loop
OUTAGE_CAP = 60.0  # longest delay of a job that met an outage, so how long after its end the last one runs
NEVER = 1_000_000_000  # more attempts than ever happen; a number, because BullMQ stores it as one
_system_random = random.Random()

DEFAULT = RetryPolicy()
DOCUMENTS = RetryPolicy(base=1, cap=30, attempts=5)  # local work: come back soon
AI = RetryPolicy(base=5, cap=300, attempts=3)  # a call costs money, and a provider's incident lasts minutes


def surviving(seconds: float, *, base: float = 1.0, cap: float = 30.0) -> RetryPolicy:
    """Bridges an outage of that length at the worst draw of every pause, with as few attempts as possible.

    After its end the last job waits at most `cap` seconds.
    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"an outage lasts some seconds, got {seconds}; to never give up: forever()")
    policy = RetryPolicy(base, cap, max_age=max(DAY, 2 * seconds), floor=0.5)
    attempts, pause, left = 1, base, seconds
    while left > 0 and pause < cap:
        left, pause, attempts = left - policy.floor * pause, 2 * pause, attempts + 1
    attempts += max(0, math.ceil(left / (policy.floor * cap)))
    return replace(policy, attempts=attempts)


def forever(*, base: float = 1.0, cap: float = 60.0) -> RetryPolicy:
    """Never gives up: for events, which nobody sends again. A permanent error still ends it. `cap`: as above."""
    return RetryPolicy(base, cap, NEVER, math.inf, 0.5)


def full_jitter(policy: RetryPolicy, attempt: int, rng: random.Random = _system_random) -> float:
    """Delay after failure number `attempt`, counted from 0.

    The popular `min(cap, base * 2**n + jitter)` adds the jitter under the cap, where it is cut off: every
    client that reaches the cap gets the same delay. Here the whole delay is random, but for the policy's `floor`.
    """
    exponent = min(max(attempt, 0), 64)  # a float times 2**1024 overflows
    share = policy.floor + (1 - policy.floor) * rng.random()
    return policy.scale * share * min(policy.cap, policy.base * 2.0**exponent)


def decide(  # noqa: PLR0911  one row per class of error
    error: BaseException,
    policy: RetryPolicy | None,
    attempts_made: int,
    *,
    age: float = 0.0,
    waits: int = 0,
    rng: random.Random = _system_random,
) -> Decision:
    """What to do after `error`. An unknown exception is transient: it ends visibly, dropped work would not.

    `attempts_made`: attempts consumed before this one, which is BullMQ's `attemptsMade` while the job runs.
    `age`: seconds since it was due, or put back by a replay. `waits`: how often it already waited for free.
    """
    policy = policy or DEFAULT
    error = _decisive(error)
    reason = f"{type(error).__name__}: {describe(error)}"
    match error:
        case Cancelled():
            return Decision(Outcome.CANCELLED, reason)
        case FailPermanently():
            return Decision(Outcome.PERMANENT, describe(error))
        case Permanent():
            return Decision(Outcome.PERMANENT, reason)
        case RetryLater() if not error.consume_attempt:
            return _wait(error.delay, describe(error), policy, age, waits)
        case RateLimited() | ResourceBusy() | Snooze():
            return _wait(_free_delay(error, policy, waits, rng), reason, policy, age, waits)
        case Unavailable():
            delay = min(OUTAGE_CAP, 2.0 ** min(waits, 64)) * (0.5 + 0.5 * rng.random())
            return Decision(Outcome.SNOOZED, reason, delay * policy.scale, consume_attempt=False)
    if attempts_made + 1 >= policy.attempts:
        spent = f"attempt {attempts_made + 1} of {policy.attempts} failed: {reason}"
        return Decision(Outcome.EXHAUSTED, spent)
    if isinstance(error, RetryLater):
        return Decision(Outcome.RETRY, reason, error.delay * policy.scale)
    return Decision(Outcome.RETRY, reason, full_jitter(policy, attempts_made, rng))


def parse_retry_after(header: str | None, now: float, *, limit: float = DAY) -> float | None:
    """Seconds to wait from an HTTP `Retry-After` (seconds or date), at most `limit`. Garbage: None.

    `now` is the epoch time to count a date from.
    """
    text = (header or "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return min(float(text), limit)
    try:
        at = parsedate_to_datetime(text)
        at = at if at.tzinfo else at.replace(tzinfo=UTC)  # "-0000" parses as naive, that is as local time
        return min(max(at.timestamp() - now, 0.0), limit)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _free_delay(
    error: RateLimited | ResourceBusy | Snooze, policy: RetryPolicy, waits: int, rng: random.Random
) -> float:
    asked = _asked(error)
    match error:
        case RateLimited():  # never earlier, it would be refused again; spread, since all were told the same
            return asked + rng.random() * max(1.0, 0.1 * asked)
        case ResourceBusy():
            ceiling = min(policy.cap, max(asked, SHORTEST_WAIT) * (waits + 1))
            return ceiling * (0.5 + 0.5 * rng.random())
    return asked


def _wait(delay: float, reason: str, policy: RetryPolicy, age: float, waits: int) -> Decision:
    delay = max(delay, SHORTEST_WAIT)
    if waits >= policy.max_waits:
        return Decision(Outcome.EXPIRED, f"waited {waits} times of {policy.max_waits:.0f}: {reason}")
    if age + delay > policy.max_age:
        late = f"{delay:.0f} s more at age {age:.0f} s pass max_age {policy.max_age:.0f} s: {reason}"
        return Decision(Outcome.EXPIRED, late)
    return Decision(Outcome.SNOOZED, reason, delay * policy.scale, consume_attempt=False)


def _asked(error: RateLimited | ResourceBusy | Snooze) -> float:
    seconds = error.delay if isinstance(error, Snooze) else error.retry_after
    return seconds if seconds > 0 else 0.0  # negative and NaN too; inf ends as expired


def _decisive(error: BaseException) -> BaseException:
    """The member of an exception group that decides: a TaskGroup wraps even a lone Permanent in one."""
    return min(_leaves(error), key=_rank)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def _rank(error: BaseException) -> tuple[int, float]:
    match error:
        case Cancelled():
            return 0, 0.0
        case Permanent() | FailPermanently():
            return 1, 0.0
        case RateLimited() | ResourceBusy() | Snooze():
            return 4, -_asked(error)  # nothing but waits: the longest covers the others
        case Unavailable():
            return 2, 0.0  # the other failures may well be its consequences
    return 3, 0.0
