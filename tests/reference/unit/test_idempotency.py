"""Keys and fingerprints: equal for the same request, different for any other."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.job import provider_key
from studyhall.patterns.core.plain_json import dumps, encoder, loads
from studyhall.patterns.idempotency import KeyReused, NotJson, fingerprint

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.one_of(json_values, st.floats(), st.dictionaries(st.integers() | st.none() | st.booleans(), json_values)))
def test_the_prepared_encoder_writes_what_json_writes(value):
    # What is signed and what is stored as a fingerprint must not change from one version to the next.
    for sort in (False, True):
        try:
            expected = json.dumps(value, sort_keys=sort, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError):  # NaN, keys that cannot be compared
            with pytest.raises((TypeError, ValueError)):
                encoder(sort_keys=sort)(value)
        else:
            assert encoder(sort_keys=sort)(value) == expected
            assert loads(expected) == loads(f" {expected} ") == json.loads(expected)


@pytest.mark.parametrize("text", ["", " ", "{", "[1]]", "nul", "1 2"])
def test_broken_json_is_refused_as_json_refuses_it(text):
    with pytest.raises(json.JSONDecodeError):
        loads(text)


def test_a_value_that_contains_itself_is_not_json():
    loop: dict[str, object] = {}
    loop["self"] = loop
    with pytest.raises(NotJson):
        dumps(loop)


class Order(BaseModel):
    customer: str
    cents: int


def reverse_keys(value):
    if isinstance(value, dict):
        return {key: reverse_keys(value[key]) for key in reversed(list(value))}
    return [reverse_keys(item) for item in value] if isinstance(value, list) else value


@given(json_values)
def test_fingerprint_ignores_the_order_of_keys(value):
    assert fingerprint(value) == fingerprint(reverse_keys(value))
    assert len(fingerprint(value)) == 64


@given(json_values, json_values)
def test_fingerprint_differs_with_the_payload(one, other):
    assert fingerprint({"a": one, "b": [other]}) != fingerprint({"a": [one], "b": other})


def test_a_model_has_the_fingerprint_of_its_json():
    assert fingerprint(Order(customer="ann", cents=5)) == fingerprint({"cents": 5, "customer": "ann"})
    assert fingerprint(Order(customer="ann", cents=5)) != fingerprint(Order(customer="ann", cents=6))


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object(), b"bytes"])
def test_what_json_cannot_hold_is_a_permanent_error(value):
    with pytest.raises(NotJson, match="dicts, lists"):
        fingerprint({"value": value})
    assert issubclass(NotJson, Permanent)
    assert issubclass(KeyReused, Permanent)


@given(st.text(), st.text(), st.text(), st.text())
def test_provider_keys_are_equal_for_the_same_step_only(k1, s1, k2, s2):
    assert (provider_key(k1, s1) == provider_key(k2, s2)) == ((k1, s1) == (k2, s2))


def test_provider_key_is_stable_across_releases_and_gives_nothing_away():
    """A change of this value would charge every order in flight during a deployment again."""
    key = provider_key("order-1-ann@example.org", "charge")
    assert key == "744f454408c29c23283f3750306cd2a7d55c70d2"
    assert "ann" not in key
