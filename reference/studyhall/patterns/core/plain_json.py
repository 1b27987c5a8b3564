"""What JSON can carry to any worker, and a name for what it cannot.

Promise: `dumps` writes the value, or raises `NotJson`, which says why and quotes nothing from it: NaN and
infinities (Node and PostgreSQL refuse them, pydantic silently writes `null`), integers of thousands of
digits (no Python parses them back), half a character (a lone surrogate: no database takes it), a value that contains
itself, nesting that no parser follows, and types without a JSON form.

When it does not hold: an integer beyond 2**53 is written as it is, and JavaScript reads a different one.
"""

import hashlib
import json
from collections.abc import Callable
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from json.scanner import make_scanner
from typing import Any

from .failures import Permanent, describe

__all__ = ["NotJson", "check", "dumps", "encoder", "fingerprint", "loads", "member_fingerprint"]

Encode = Callable[[Any], str]


class NotJson(Permanent):
    """The value cannot be stored as JSON. Give dicts, lists, strings, finite numbers, booleans or None."""


def dumps(value: Any, encode: Encode | None = None) -> str:
    """Compact ASCII JSON. `encode` is another encoder's method, made with `allow_nan=False`."""
    try:
        text = (encode or _compact)(value)
        if "\\ud" in text:  # rare: an emoji, or half of one
            _unescaped(value).encode()
        return text
    except UnicodeEncodeError:
        why = "A text holds half a character (a lone surrogate)."
    except RecursionError:
        why = "It is nested too deep."
    except (TypeError, ValueError) as error:
        why = describe(error, 200)
    raise NotJson(f"{NotJson.__doc__} {why}")


def check(value: Any) -> None:
    """Raise `NotJson` for what a serialiser would change or choke on; dates and the like are its business."""
    dumps(value, _lenient)


def fingerprint(payload: object) -> str:
    """Equal for equal payloads, whatever the order of their keys. Takes JSON values and pydantic models."""
    plain = payload.model_dump(mode="json") if hasattr(payload, "model_dump") else payload
    return hashlib.sha256(dumps(plain, _canonical).encode()).hexdigest()


def member_fingerprint(text: str, data: dict[str, Any], name: str, last: str) -> str:
    """The fingerprint of member `name`, cut from `text`: the canonical form of `data`, except that member `last` is at
    the end. Far less work where `name` is nearly all of it."""
    before = {key: value for key, value in data.items() if key < name and key != last}
    after = {key: value for key, value in data.items() if key > name and key != last}
    begin = len(dumps({**before, name: 0}, _canonical)) - 2
    end = len(text) - len(dumps({**after, last: data[last]}, _compact))
    # One copy of a large text, not two: it is ASCII, so these are the positions of its bytes too.
    return hashlib.sha256(memoryview(text.encode())[begin:end]).hexdigest()


def _leaf(_value: object) -> None:
    return None


def encoder(*, sort_keys: bool = False) -> Encode:
    """What `json.dumps` does for compact JSON, made once: `JSONEncoder.encode` makes its C encoder again for each
    value, which takes as long as a small one."""
    plain = json.JSONEncoder(sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    if c_make_encoder is None:  # another Python
        return plain.encode
    # No markers: a value that contains itself ends in a RecursionError.
    chunks = c_make_encoder(None, plain.default, encode_basestring_ascii, None, ":", ",", sort_keys, False, False)
    return lambda value: "".join(chunks(value, 0))


def loads(text: str) -> Any:
    """`json.loads` for text without blanks around it, in half the time."""
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        end = -1
    return value if end == len(text) else json.loads(text)


_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
_compact, _canonical = encoder(), encoder(sort_keys=True)
_lenient: Encode = json.JSONEncoder(allow_nan=False, skipkeys=True, default=_leaf).encode
_unescaped: Encode = json.JSONEncoder(ensure_ascii=False, skipkeys=True, default=_leaf).encode
