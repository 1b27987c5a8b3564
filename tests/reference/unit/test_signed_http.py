"""Only what a sender with the secret signed just now is read."""

import hashlib
import hmac

import pytest

from studyhall.patterns.signed_http import NotSigned, sign, verify

BODY, NOW = '{"id": "evt_1", "who": "Zoë"}'.encode(), 1_700_000_000.0


def mac(secret, text):
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def test_what_was_signed_just_now_passes_and_secrets_rotate():
    assert sign("old", BODY, now=NOW) == f"t=1700000000,v1={mac('old', b'1700000000.' + BODY)}"
    verify(["old"], sign("old", BODY, now=NOW), BODY, now=NOW + 299)
    verify(["new", "old"], sign("old", BODY, now=NOW), BODY, now=NOW)
    both = f"t=1700000000, v1={mac('gone', b'1700000000.' + BODY)}, v1={mac('new', b'1700000000.' + BODY)}, v0=x"
    verify(["new"], both, BODY, now=NOW)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "v1=",
        "t=1700000000",
        "t=1700000000,v1=",
        "t=1700000000,v1=é",
        f"t=1700000000,v1={mac('other', b'1700000000.' + BODY)}",
        f"t=1700000001,v1={mac('old', b'1700000000.' + BODY)}",
        f"t=1700000000,v0={mac('old', b'1700000000.' + BODY)}",
        f"t=,v1={mac('old', b'.' + BODY)}",
        f"t=NaN,v1={mac('old', b'NaN.' + BODY)}",
        f"t=²,v1={mac('old', '².'.encode() + BODY)}",
    ],
)
def test_a_forged_or_broken_header_is_refused(header):
    with pytest.raises(NotSigned):
        verify(["old"], header, BODY, now=NOW)


def test_an_altered_body_and_an_old_request_are_refused():
    header = sign("old", BODY, now=NOW)
    for body, now in ((BODY + b" ", NOW), (BODY, NOW + 301), (BODY, NOW - 301)):
        with pytest.raises(NotSigned):
            verify(["old"], header, body, now=now)
    verify(["old"], header, BODY, now=NOW + 301, max_age=600)
