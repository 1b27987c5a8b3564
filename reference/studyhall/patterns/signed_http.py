"""Requests that their sender signed: the scheme of Stripe and many others, `t=…,v1=…` in one header.

Promise: `verify` passes only what somebody with one of the secrets signed within `max_age` seconds; the raw body and
the time are signed, and compared in constant time. Secrets rotate without a gap: sign with one, accept several.

It does not hold against whoever has a secret. The same request again within `max_age` passes: have a key in the body,
and let it take effect once.
"""

import hashlib
import hmac
import time
from collections.abc import Iterable

from .core.failures import Permanent

__all__ = ["NotSigned", "sign", "verify"]


class NotSigned(Permanent):
    """The request is not signed with a secret that we know, or too old. Check the secret and this clock."""


def sign(secret: str, body: bytes, *, now: float | None = None) -> str:
    """The header's value."""
    at = str(int(time.time() if now is None else now))
    return f"t={at},v1={_mac(secret, at, body)}"


def verify(
    secrets: Iterable[str], header: str, body: bytes, *, max_age: float = 300.0, now: float | None = None
) -> None:
    """Raise `NotSigned` unless this header signs exactly these bytes: the body as it came, never re-serialised."""
    parts = [part.strip().partition("=")[::2] for part in header.split(",")]
    at = dict(parts).get("t", "")
    signatures = [mac.encode() for name, mac in parts if name == "v1"]  # several while the sender rotates
    known = [_mac(secret, at, body).encode() for secret in secrets]
    if not any(hmac.compare_digest(expected, mac) for expected in known for mac in signatures):
        raise NotSigned(str(NotSigned.__doc__))
    # Only now: `at` is signed, so the sender wrote a number.
    age = (time.time() if now is None else now) - (float(at) if at.isdecimal() else 0.0)
    if abs(age) > max_age:
        raise NotSigned(str(NotSigned.__doc__))


def _mac(secret: str, at: str, body: bytes) -> str:
    return hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
