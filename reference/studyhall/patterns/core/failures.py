"""Errors for code that only enqueues or stores, and text about any error. `errors` offers them too."""

import re

MAX_TEXT = 8_192
# PostgreSQL refuses NUL, UTF-8 has no lone surrogates, and other control characters rewrite a terminal's lines.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class JobError(Exception):
    """Root of everything a handler raises on purpose."""


class Transient(JobError):
    """May pass by itself (network, 5xx, timeout): retry with backoff, consuming an attempt."""


class Unavailable(Transient):
    """Something that every job needs is away (the database): wait for its return, consuming no attempt."""


class Permanent(JobError):
    """Will never pass (bad input, 4xx, forged job): fail now, whatever attempts are left."""


class InvalidDelay(Permanent):
    """The delay is not a number of seconds between 0 and a year."""


class KeyReused(Permanent):
    """The key was used for another payload. One key names one request: take a new key or the same payload."""


class Cancelled(JobError):
    """Somebody asked for this job to stop. It ends as cancelled and never comes back as a retry."""


class QueueUnavailable(JobError):
    """The queue did not answer in time. Nothing is lost: try again with the same key."""


class FailedTwin(JobError):
    """A job with this key failed and was not archived yet. Replay it from the dead letters instead."""


def clean_text(text: str, limit: int = MAX_TEXT) -> str:
    """The text as every database, broker and terminal takes it, cut at `limit` characters."""
    clean = _UNSAFE.sub("\ufffd", text[: limit + 1])
    return clean if len(clean) <= limit else clean[:limit] + "…"


def describe(error: BaseException, limit: int = MAX_TEXT) -> str:
    """What the error says, or its class if it says nothing: never raises, whatever its `__str__` does."""
    try:
        text = str(error)
    except BaseException:  # a panic of Rust code is not an Exception
        text = ""
    return clean_text(text or type(error).__name__, limit)
