"""Interactions: what is read, what is refused, how answers are cut."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey

from studyhall.patterns.deferred_reply.replies import (
    MAX_AGE,
    MAX_AHEAD,
    NotSigned,
    Unreadable,
    parse,
    received,
    split,
    verify,
)

KEY = SigningKey(b"k" * 32)
PUBLIC = KEY.verify_key.encode().hex()
BODY = b'{"type":1}'


def signature(body, timestamp, key=KEY):
    return key.sign(timestamp.encode() + body).signature.hex()


def refused(timestamp, body=BODY, sig=None, **options):
    try:
        verify(PUBLIC, signature(BODY, timestamp) if sig is None else sig, timestamp, body, **options)
    except NotSigned:
        return True
    return False


def test_only_what_the_platform_signed_just_now_is_read():
    now = str(int(time.time()))
    assert not refused(now)
    assert refused(now, BODY + b" "), "one byte more"
    assert refused(now, sig=signature(BODY, now, SigningKey.generate())), "somebody else's key"
    assert refused(now, sig=signature(BODY, str(int(now) - 1))), "the signature covers the timestamp"
    for nonsense in ("", "zz", "00" * 64, "00" * 63, "é"):
        assert refused(now, sig=nonsense)


@pytest.mark.parametrize(
    ("age", "fate"),
    [(0.0, False), (MAX_AGE - 1, False), (MAX_AGE + 1, True), (-MAX_AHEAD + 1, False), (-MAX_AHEAD - 1, True)],
)
def test_a_recorded_request_is_worthless_soon(age, fate):
    assert refused("1700000000", now=1700000000 + age) is fate


@pytest.mark.parametrize("timestamp", ["nan", "inf", "-inf", "", "1e400", "now"])
def test_a_signed_timestamp_that_is_not_a_time_is_refused(timestamp):
    assert refused(timestamp)


def command(**changes):
    data = {
        "id": "1",
        "application_id": "2",
        "token": "secret-token",
        "type": 2,
        "user": {"id": "3"},
        "data": {"name": "ask", "options": [{"name": "question", "value": "why?"}]},
    }
    return json.dumps({**data, **changes}).encode()


def test_a_command_is_read_and_its_token_is_not_shown():
    read = parse(command())
    assert read is not None
    assert (read.command, read.options["question"], read.user) == ("ask", "why?", "3")
    assert "secret-token" not in repr(read)
    assert parse(b'{"type": 1}') is None, "a PING"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"nonsense",
        b'{"type":9}',
        command(id=""),
        command(token=7),
        command(data=[]),
        command(id="x" * 101),
    ],
)
def test_anything_but_a_command_is_one_error(body):
    with pytest.raises(Unreadable):
        parse(body)


@given(st.text(min_size=1, max_size=9_000), st.integers(10, 2_000))
def test_every_part_fits_and_no_word_is_lost_while_there_is_room(text, limit):
    parts = split(text, limit, most=10_000)
    assert all(0 < len(part.encode("utf-16-le", "surrogatepass")) // 2 <= limit for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


@given(st.lists(st.text("ab cd\n", min_size=1, max_size=2_500), min_size=1, max_size=14))
def test_no_text_is_dropped_that_fits_three_quarters_of_the_parts(paragraphs):
    text = "\n\n".join(paragraphs)[:37_000]
    assert "".join("".join(split(text)).split()) == "".join(text.split())


def test_eight_thousand_characters_in_short_paragraphs_arrive_whole():
    """Cut at the first half of each part, 5,252 of 8,414 characters came out."""
    text = "\n\n".join("word " * 210 for _ in range(8)).strip()
    parts = split(text)
    assert 8_000 < len(text) < 9_000
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert not parts[-1].endswith("…")


def test_a_redelivery_within_the_age_that_the_caller_allows_is_read():
    sent = "1700000000"
    assert not refused(sent, now=1700000000 + 60), "30 s refused honest redeliveries"
    assert refused(sent, now=1700000000 + 60, max_age=30)
    assert not refused(sent, now=1700000000 + 900, max_age=1_000)


def test_answers_are_cut_where_people_would_cut_and_bounded():
    text = "\n\n".join("word " * 150 for _ in range(5)).strip()
    assert len(text) > 2_000, "the platform refuses the whole text"
    assert all(part.startswith("word") and part.endswith("word") for part in split(text))
    long = split("x" * 100_000)
    assert len(long) == 25
    assert long[-1].endswith(" …")
    assert all(len(part) <= 2_000 for part in long)
    assert split("   ") == []


def test_what_came_is_verified_before_it_is_parsed():
    now, key = str(int(time.time())), KEY.verify_key.encode().hex()
    head = {"x-signature-timestamp": now, "x-signature-ed25519": signature(BODY, now)}
    assert received(key, head, BODY) == parse(BODY)
    with pytest.raises(NotSigned):
        received(key, head, b"not even JSON")
    with pytest.raises(NotSigned):
        received(key, {}, BODY)
