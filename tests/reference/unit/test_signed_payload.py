"""Signatures over a job's name, id and data."""

import base64
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studyhall.patterns import signed_payload
from studyhall.patterns.core.errors import ForgedJob, Permanent
from studyhall.patterns.core.request import JobRef, JobRequest, Outgoing
from studyhall.patterns.signed_payload import Signer

OLD, NEW = "old-key-old-key-old", "new-key-new-key-new"
DATA = {"v": 1, "payload": {"to": "ann", "cents": 100}, "key": "k", "meta": {"cid": "c"}}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=10), json_values, max_size=5))
def test_what_was_signed_verifies_after_a_trip_through_json(data):
    data.pop("sig", None)
    stored = json.loads(json.dumps(Signer([OLD]).sign("n", "i", data)))
    Signer([OLD]).verify("n", "i", stored)


@pytest.mark.parametrize(
    ("name", "ident", "change"),
    [
        ("other", "i", {}),
        ("n", "j", {}),
        ("n", "i", {"payload": {"to": "mallory", "cents": 100}}),
        ("n", "i", {"key": "l"}),
        ("n", "i", {"meta": {"cid": "d"}}),
        ("n", "i", {"more": 1}),
        ("n", "i", {"sig": None}),
        ("n", "i", {"sig": 7}),
        ("n", "i", {"sig": ""}),
        ("n", "i", {"sig": "no-dot"}),
        ("n", "i", {"sig": "deadbeef.00"}),
        ("n", "i", {"sig": "\ud800.\ud800"}),
    ],
)
def test_any_change_is_seen(name, ident, change):
    signer = Signer([OLD])
    signed = signer.sign("n", "i", DATA)
    with pytest.raises(ForgedJob) as refused:
        signer.verify(name, ident, {**signed, **change})
    assert isinstance(refused.value, Permanent), "never retried"


def stored_text():
    job = Outgoing(JobRequest("n", DATA, "k"), JobRef("q", "n", "i", "k"), DATA, {})
    Signer([OLD]).seal(job)
    assert json.loads(job.text) == job.data
    return job.text


def test_the_text_that_a_producer_stores_is_checked_as_it_is(monkeypatch):
    text = stored_text()
    monkeypatch.setattr(signed_payload, "_body", lambda data: pytest.fail("encoded again"))
    Signer([NEW, OLD]).verify("n", "i", json.loads(text), text)


def test_text_of_an_older_version_and_text_that_a_tool_wrote_again_verify():
    data = json.loads(stored_text())
    for text in (json.dumps(data), json.dumps({"sig": data["sig"], **DATA}, separators=(",", ":"))):
        Signer([OLD]).verify("n", "i", json.loads(text), text)


def test_a_changed_text_or_a_moved_signature_is_refused():
    text, signer = stored_text(), Signer([OLD])
    member = text[text.index(',"sig"') : -1]
    without = text.replace(member, "")
    forged = [
        text.replace("100", "900"),
        text.replace('"cents":100', '"cents":100,"cents":900'),
        without.replace('"ann"', f'"ann"{member}'),
        without.replace('"ann"', f'"ann"{member}')[:-1] + f"{member}}}",
        text[:-1] + ',"payload":{"to":"mallory","cents":100}}',
        f"{text[:-1]}{member}}}".replace("100", "900"),
    ]
    for forgery in forged:
        with pytest.raises(ForgedJob):
            signer.verify("n", "i", json.loads(forgery), forgery)
    with pytest.raises(ForgedJob):
        signer.verify("n", "j", json.loads(text), text)


def test_a_lone_surrogate_in_the_signature_is_a_forgery_and_not_a_crash():
    signer = Signer([OLD])
    key_id = signer.sign("n", "i", DATA)["sig"].split(".")[0]
    with pytest.raises(ForgedJob):
        signer.verify("n", "i", {**DATA, "sig": f"{key_id}.\ud800"})


@pytest.mark.parametrize("data", [None, [], "text", 7, {}])
def test_data_that_is_not_an_object_is_a_forgery(data):
    with pytest.raises(ForgedJob, match="not signed"):
        Signer([OLD]).verify("n", "i", data)


def test_data_too_deep_to_be_ours_is_a_forgery_and_not_a_crash():
    signer = Signer([OLD])
    deep = 0
    for _ in range(100_000):
        deep = [deep]
    key_id = signer.sign("n", "i", DATA)["sig"].split(".")[0]
    with pytest.raises(ForgedJob):
        signer.verify("n", "i", {"payload": deep, "sig": f"{key_id}.00"})


@pytest.mark.parametrize("keys", [[], ["short"], [OLD, "short"], [""]])
def test_no_key_or_a_short_one_is_refused_at_the_start(keys):
    with pytest.raises(ValueError, match="16 bytes"):
        Signer(keys)


def test_the_signature_does_not_give_the_key_away():
    assert OLD not in json.dumps(Signer([OLD]).sign("n", "i", DATA))


@pytest.mark.parametrize("length", [16, 63, 64, 65, 200])
def test_the_signature_is_the_hmac_that_every_library_computes(length):
    key = ("ключ" * length)[:length]
    signature = Signer([key]).sign("n", "i", {"v": 1})["sig"]
    expected = hmac.new(key.encode(), b'["n","i",{"v":1}]', "sha256").digest()
    assert signature.partition(".")[2] == base64.b64encode(expected[:16]).decode().rstrip("=")


def test_the_long_signature_of_older_producers_verifies_and_no_part_of_either_form_does():
    signer, mac = Signer([OLD]), hmac.new(OLD.encode(), b'["n","i",{"v":1}]', "sha256")
    key_id, _, short = signer.sign("n", "i", {"v": 1})["sig"].partition(".")
    signature = f"{key_id}.{mac.hexdigest()}"
    assert signer.verify("n", "i", {"v": 1, "sig": signature}, f'{{"v":1,"sig":"{signature}"}}')
    assert not signer.verify("n", "i", {"v": 1, "sig": signature})
    other = hmac.new(OLD.encode(), b'["n","i",{"v":2}]', "sha256").hexdigest()
    for part in ("", short[:-1], short[:5], f"{short}==", short.swapcase(), mac.hexdigest()[:32], other):
        with pytest.raises(ForgedJob):
            signer.verify("n", "i", {"v": 1, "sig": f"{key_id}.{part}"})
