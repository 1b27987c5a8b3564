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
from typing import Any

from .failures import Permanent, describe

__all__ = ["NotJson", "check", "dumps", "fingerprint", "member_fingerprint"]

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
    return hashlib.sha256(text[begin:end].encode()).hexdigest()


def _leaf(_value: object) -> None:
    return None


# Made once: half the cost of json.dumps().
_compact: Encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_canonical: Encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
_lenient: Encode = json.JSONEncoder(allow_nan=False, skipkeys=True, default=_leaf).encode
_unescaped: Encode = json.JSONEncoder(ensure_ascii=False, skipkeys=True, default=_leaf).encode
