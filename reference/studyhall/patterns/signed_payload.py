"""Only jobs that our own producers made are executed.

Promise: a job whose name, id or data was altered, or that carries no signature, fails permanently and its
handler never runs. Keys rotate without a gap: sign with the first, accept all. To rotate: give every worker
the new key as the second one, then make it the first, then drop the old one when no job signed with it is
left (a day after the longest delay, retry and dead-letter age).

A signature is 128 bits in base64. The long form, 256 bits in hex, is accepted too: older producers write it. Older
workers refuse the short one as forged, so deploy workers before producers.

It does not hold against somebody who has the key, and it does not hide the payload: it is signed, not
encrypted. Replaying a genuine job under its own id is stopped by the idempotency marker, not here. A job's
options (attempts, delay, priority) are not signed: whoever can write to Redis can still delay or drop jobs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from .core.errors import ForgedJob
from .core.execution import CallNext, JobContext, Step, before
from .core.plain_json import NotJson, dumps, encoder
from .core.request import AddNext, AddStep, Outgoing

__all__ = ["ForgedJob", "Signer", "signed", "signing"]

FIELD = "sig"
MIN_KEY_BYTES = 16
_canonical = encoder(sort_keys=True)


def signed(signer: Signer, identity: Callable[[str, Any], str] = lambda job_id, _: job_id) -> Step:
    """Only jobs that `signer` accepts go on. `identity`: the id that was signed, where it is not the job's own
    (the ticks of a schedule: `schedule.signing_id`)."""

    @before("payload")
    def signed(run: JobContext, call_next: CallNext) -> Awaitable[Any]:
        data = run.job.data
        run.seal = FIELD if signer.verify(run.name, identity(run.job_id, data), data, run.text) else ""
        return call_next(run)

    return signed


def signing(signer: Signer) -> AddStep:
    """For a producer, after every step that changes the data: sign what goes into the queue."""

    async def signing(jobs: Sequence[Outgoing], call_next: AddNext) -> None:
        for job in jobs:
            signer.seal(job)
        await call_next()

    signing.signer = signer  # type: ignore[attr-defined]  # a schedule signs its templates with it
    return signing


class Signer:
    """`Signer(["new-key", "old-key"])`: signs with the first key, verifies with any."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not keys or any(len(key.encode()) < MIN_KEY_BYTES for key in keys):
            raise ValueError(f"signing needs at least one key of {MIN_KEY_BYTES} bytes or more")
        # The id of a key is a digest of it: it names the key in the job without giving it away.
        self._keys = {
            hashlib.sha256(b"id" + key.encode()).hexdigest()[:8]: hmac.new(key.encode(), digestmod="sha256")
            for key in keys
        }
        self._current = next(iter(self._keys))

    def sign(self, name: str, job_id: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `data` with the signature added. Raises `NotJson` for what no worker could read."""
        body = _body(data)
        # In the order of the canonical form, which is what `verify` reads fastest.
        return {**json.loads(body), FIELD: self._signature(name, job_id, body)}

    def seal(self, job: Outgoing) -> None:
        """The same for a job on its way, with the text that is stored: what was signed, and the signature."""
        body = _body(job.data)
        signature = self._signature(job.ref.name, job.ref.id, body)
        job.data = {**job.data, FIELD: signature}
        job.sealed = (job.data, f"{body[:-1]}{_member(signature)}}}")

    def _signature(self, name: str, job_id: str, body: str) -> str:
        return f"{self._current}.{_short(_mac(self._keys[self._current], name, job_id, body)).decode()}"

    def verify(self, name: str, job_id: str, data: Mapping[str, Any], text: str | None = None) -> bool:
        """Raise `ForgedJob` unless one of our keys signed exactly this. `text`: what `data` was read from; True when it
        is, but for the signature, letter for letter what was signed."""
        signature = data.get(FIELD) if isinstance(data, Mapping) else None
        if not isinstance(signature, str):
            raise ForgedJob("the job is not signed: enqueue it through Producer, or give both sides the same keys")
        key_id, _, mac = signature.partition(".")
        key = self._keys.get(key_id)
        if key is None:
            raise ForgedJob("the job is signed with a key this worker does not know: add it to the accepted keys")
        given = mac.encode(errors="replace")
        # Our producers write the canonical form and put the signature at its end, after what was signed.
        end = f"{_member(signature)}}}"
        signed = f"{text[: -len(end)]}}}" if text and text.endswith(end) else ""
        if signed and _same(given, _mac(key, name, job_id, signed)):
            return True
        try:  # written by others: an older version, a tool that changed the job
            if _same(given, _mac(key, name, job_id, _body(data))):
                return False
        except NotJson:  # nothing our own producer could have written
            pass
        raise ForgedJob("the signature does not match: the job's name, id or data was altered")


def _body(data: Mapping[str, Any]) -> str:
    """Canonical JSON: the order of keys and the blanks in Redis do not matter."""
    return dumps({k: v for k, v in data.items() if k != FIELD}, _canonical)


def _member(signature: str) -> str:
    return f',"{FIELD}":"{signature}"'


def _mac(key: hmac.HMAC, name: str, job_id: str, body: str) -> bytes:
    mac = key.copy()  # what depends on the key alone is computed once
    mac.update(f"[{_quoted(name)},{_quoted(job_id)},{body}]".encode())
    return mac.digest()


def _short(mac: bytes) -> bytes:
    return b2a_base64(mac[:16], newline=False)[:22]  # without the padding


def _same(given: bytes, mac: bytes) -> bool:
    expected = mac.hex().encode() if len(given) == 2 * len(mac) else _short(mac)
    return hmac.compare_digest(given, expected)
