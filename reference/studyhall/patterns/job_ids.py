"""Job ids that mean something and work everywhere.

Promise: the same business request always gets the same job id, so a second `add` of it is the same job, from
any process, in Python and in Node, whatever the key contains.

It does not hold once the job has left Redis (retention): then the id is free again, and the idempotency marker
in the database is what stops the second effect.

Why not plain keys: `order:123` and `42` throw in Node and are accepted in Python; a numeric custom id is
overwritten by an automatic one; `meta`, `wait` and other names of the queue's own keys are dropped or crash.
"""

from __future__ import annotations

import hashlib
import re

from .errors import Permanent

__all__ = ["InvalidKey", "job_id"]

MAX_READABLE = 80
_PORTABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class InvalidKey(Permanent):
    """The business key is empty or not text. Pass what makes the request unique, such as the order number."""


def job_id(name: str, key: str) -> str:
    """`graph-generation.doc-42` when the key is short and portable, else the name and a digest of the key."""
    if not isinstance(key, str) or not key.strip():
        raise InvalidKey(InvalidKey.__doc__)
    if not _PORTABLE.fullmatch(name):
        raise InvalidKey(f"job name {name!r} may only hold letters, digits, '.', '_' and '-'")
    # A dot joins the two because ':' separates Redis keys and is refused by BullMQ on Node.
    if len(key) <= MAX_READABLE and _PORTABLE.fullmatch(key) and ".sha-" not in key:
        return f"{name}.{key}"
    return f"{name}.sha-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
