"""Redaction: secrets and personal data are removed from everything that is written down.

Promise: a value under a telling key (password, token, e-mail, card, …) is replaced, and so is anything that
looks like an e-mail address, a bearer or API token, a JWT, a private key, a card number with a valid check
digit, or the credentials in a URL, wherever it stands. Objects that are not plain data appear by type name
only, because their repr is not ours to trust.

Does not hold for a secret with neither a telling key nor a known shape. So payloads are never logged at
all; redaction is the second line of defence, not the first.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from .failures import describe

__all__ = ["REDACTED", "redact", "redact_text"]

REDACTED = "[redacted]"
MAX_TEXT = 8_192
OVERLAP = 512
MAX_DEPTH = 8
MAX_ITEMS = 100

# Telling wherever they stand in a key, and telling only as a word of it ("pin" is in "spinner"). A count of
# "tokens" is not a secret.
_ANYWHERE = (
    r"passw|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|credential|cookie|email"
    r"|token(?!s|iz)"
)
_AS_WORD = (
    r"pass|pwd|auth(?:orization)?|session(?:[_-]?id)?|otp|pin|card|pan|cvv|cvc|iban|ssn|e-mail|phone|address"
    r"|birth(?:day|date)?|signature"
)
_TELLING_KEY = re.compile(rf"(?i){_ANYWHERE}|(?:^|[_\W])(?:{_AS_WORD})s?\d*(?:$|[_\W])")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# For most texts one cheap scan shows that there is nothing to look for.
_SUSPECT = re.compile(
    r"[@=:\ud800-\udfff]|eyJ|-----BEGIN|\d(?:[ -]?\d){12}|(?i:bearer|basic)\s"
    r"|(?:[spr]k[-_]|gh[a-z]_|github_|xox|AKIA|ASIA|AIza|glpat|npm_|whsec_)"
)
# A word starts here, also after an escape: in the repr of "\nbearer" the letter before it is an n.
_START = r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt])|(?<=\\x[0-9a-f]{2})|(?<=\\u[0-9a-f]{4}))"
# password=…, 'api_key': '…', \"token\": \"…\" in JSON within JSON
_ASSIGNED = re.compile(
    rf"(?i)((?:(?:{_ANYWHERE})[\w-]{{0,20}}|{_START}(?:[\w-]{{0,20}}[_-])?(?:{_AS_WORD})s?\d{{0,3}})"
    rf"\\{{0,16}}['\"]?\s{{0,9}}[=:]\s{{0,9}})"
    r"(?:[bru]?\\{0,16}\"[^\"]*\"?|[bru]?\\{0,16}'[^']*'?|[^\s,;&]+)"
)
_TOKEN = re.compile(
    _START + r"(?:[spr]k[-_][\w-]{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|xox[a-z]-[\w-]{8,}|glpat-[\w-]{16,}"
    r"|npm_\w{16,}|whsec_\w{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,})"
)
# A needle that is quick to look for, the shape, what to write instead. Every repetition is bounded: an open one
# takes quadratic time on text made for that.
_SHAPES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    (
        "private key",
        re.compile(r"(?s)-----BEGIN [A-Z ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z ]{0,40}KEY-----|\Z)"),
        REDACTED,
    ),
    ("authorization", re.compile(r"(?i)(authorization['\"]?\s{0,9}[=:]\s{0,9})[^\r\n]+"), rf"\1{REDACTED}"),
    ("cookie", re.compile(r"(?i)(cookie['\"]?\s{0,9}[=:]\s{0,9})[^\r\n]+"), rf"\1{REDACTED}"),
    ("bearer", re.compile(rf"(?i){_START}(bearer)\s{{1,9}}[^\s'\",;]+"), rf"\1 {REDACTED}"),
    ("basic", re.compile(rf"(?i){_START}(basic)\s{{1,9}}[^\s'\",;]+"), rf"\1 {REDACTED}"),
    ("eyj", re.compile(_START + r"eyJ[\w-]{5,2048}\.[\w.-]+"), REDACTED),  # JWT
    ("://", re.compile(r"(?<=://)[^\s/@'\"]{0,256}:[^\s/'\"]{0,256}@"), f"{REDACTED}@"),  # user:password@host
    ("", _TOKEN, REDACTED),
    ("@", re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+"), REDACTED),  # e-mail
    ("", _ASSIGNED, rf"\1{REDACTED}"),
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # alone, as JSON may have it: UTF-8 cannot
_clean: set[str] = set()  # short texts known to hold nothing: names of queues and outcomes come every time
_CARD = re.compile(_START + r"\d(?:[ -]?\d){12,18}(?!\w)")


def redact_text(text: str) -> str:
    """The text without the secrets of known shape, cut at 8 KB."""
    if text in _clean:
        return text
    if _SUSPECT.search(text, 0, MAX_TEXT + OVERLAP) is None:
        if len(text) <= 64:
            if len(_clean) >= 4_096:
                _clean.clear()
            _clean.add(text)
        return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    # Cut after redaction: half a secret has no known shape.
    clean = _SURROGATE.sub("\ufffd", text[: MAX_TEXT + OVERLAP])
    small = clean.lower()
    for needle, shape, instead in _SHAPES:
        if needle in small:
            clean = shape.sub(instead, clean)
    clean = _CARD.sub(lambda match: REDACTED if _luhn(re.sub(r"\D", "", match[0])) else match[0], clean)
    return clean if len(text) <= MAX_TEXT else clean[:MAX_TEXT] + "…"


def redact(value: Any, *, depth: int = MAX_DEPTH) -> Any:
    """A copy that is safe to write down: plain JSON types, secrets replaced, depth and length bounded."""
    if value is None or isinstance(value, bool | int | float | str):
        return _scalar(value)
    if hasattr(type(value), "model_fields"):  # of pydantic, which need not be installed
        value = dict(value)
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {redact_text(describe(value))}"
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return f"<{type(value).__name__}>"
    if depth == 0:
        return "…"
    if not isinstance(value, Mapping):
        return [redact(item, depth=depth - 1) for item in list(value)[:MAX_ITEMS]]
    safe: dict[str, Any] = {}
    for key, item in islice(value.items(), MAX_ITEMS):
        name, telling = _key(str(key))
        if telling:
            safe[name] = REDACTED
        else:
            safe[name] = redact_text(item) if type(item) is str else redact(item, depth=depth - 1)
    return safe


def _scalar(value: bool | int | float | str | None) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if type(value) is int and abs(value) >= 10**12:
        return REDACTED if _luhn(str(abs(value))) else value
    return value


@lru_cache(maxsize=2_048)
def _key(key: str) -> tuple[str, bool]:
    """How to write it, and whether a secret follows."""
    return redact_text(key), _TELLING_KEY.search(_HUMP.sub("_", key[:200])) is not None


def _luhn(digits: str) -> bool:
    """The check digit of payment cards; one random number in ten passes too, better hidden than shown."""
    if not 13 <= len(digits) <= 19:
        return False
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0
