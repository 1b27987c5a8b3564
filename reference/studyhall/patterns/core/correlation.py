"""The correlation id: on whose behalf code works, from the request through every job and event that follows from it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["correlation", "current_correlation_id", "new_correlation_id"]

_GOOD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_correlation: ContextVar[str] = ContextVar("correlation_id", default="")


def new_correlation_id() -> str:
    return uuid.uuid4().hex


def current_correlation_id() -> str:
    """The id of the request or job that this code works for; empty outside of one."""
    return _correlation.get()


@contextmanager
def correlation(ident: object = None) -> Iterator[str]:
    """Work under this correlation id, or a new one when `ident` is none that we would write into a log."""
    given = ident if isinstance(ident, str) and _GOOD_ID.fullmatch(ident) else new_correlation_id()
    was = _correlation.set(given)
    try:
        yield given
    finally:
        _correlation.reset(was)
