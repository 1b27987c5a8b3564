"""Job ids that mean something and work everywhere.

Promise: the same business request always gets the same job id, and two different ones never share one, so a
second `add` of a request is the same job, from any process, in Python and in Node, whatever the key contains.

It does not hold once the job has left Redis (retention): then the id is free again, and the idempotency marker
in the database is what stops the second effect.

Why not plain keys: `order:123` and `42` throw in Node (two colons pass); Python takes the first and replaces the
second with an automatic id; `meta`, `wait` and other names of the queue's own keys are dropped or crash, and `1:logs`
is the key of job 1's log.
"""

import hashlib
import re

from .core.failures import Permanent

__all__ = ["InvalidKey", "job_id"]

MAX_READABLE = 80
MAX_KEY = 500  # characters; it is also a key in the database, whose index entries are limited
_PORTABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# No dot: names may hold dots, so ("a", "b.c") and ("a.b", "c") would share an id. No "sha-": that is a digest.
_READABLE = re.compile(r"(?!sha-)[A-Za-z0-9][A-Za-z0-9_-]*")


class InvalidKey(Permanent):
    """The business key is empty, too long or not text. Pass what makes the request unique, such as an order number."""


def job_id(name: str, key: str) -> str:
    """`graph-generation.doc-42` when the key is short and portable, else the name and a digest of the key."""
    if not isinstance(key, str) or not key.strip() or len(key) > MAX_KEY or "\0" in key:
        raise InvalidKey(InvalidKey.__doc__)
    if not isinstance(name, str) or not _PORTABLE.fullmatch(name):
        raise InvalidKey(f"job name {name!r} may only hold letters, digits, '.', '_' and '-'")
    # A dot joins the two because ':' separates Redis keys and is refused by BullMQ on Node.
    if len(key) <= MAX_READABLE and _READABLE.fullmatch(key):
        return f"{name}.{key}"
    try:
        digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    except UnicodeEncodeError:
        raise InvalidKey(f"the key holds half a character (a lone surrogate). {InvalidKey.__doc__}") from None
    return f"{name}.sha-{digest}"
