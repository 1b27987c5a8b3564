"""Job ids: the same for the same request, never the same for two."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studyhall.patterns.job_ids import InvalidKey, job_id

names = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,20}", fullmatch=True)
keys = st.text(min_size=1, max_size=60).filter(lambda key: key.strip() and "\0" not in key)


def test_short_portable_keys_stay_readable():
    assert job_id("graph-generation", "doc-42") == "graph-generation.doc-42"


@given(names, keys)
def test_every_id_is_portable_and_stable(name, key):
    ident = job_id(name, key)
    assert ident == job_id(name, key)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", ident), "no colon, no blank: fit for Redis keys, Node and URLs"
    assert not ident.isdigit(), "BullMQ replaces numeric ids"


@given(names, keys, names, keys)
def test_two_requests_never_share_an_id(name, key, other_name, other_key):
    if (name, key) != (other_name, other_key):
        assert job_id(name, key) != job_id(other_name, other_key)


def test_names_and_keys_with_dots_do_not_run_into_each_other():
    """Joined by a plain dot, both of these would be `a.b.c`: the second job would never be added."""
    assert job_id("a", "b.c") != job_id("a.b", "c")


def test_a_key_cannot_pose_as_the_digest_of_another():
    digest = job_id("n", "order:1").removeprefix("n.")
    assert job_id("n", digest) != job_id("n", "order:1")


@pytest.mark.parametrize("key", ["", "  ", None, 42, b"x", "k" * 501, "a\0b", "half \ud800 character"])
def test_keys_that_name_nothing_are_refused_by_name(key):
    with pytest.raises(InvalidKey, match="key"):
        job_id("n", key)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a:b", "a b", ".x", "ü"])
def test_names_that_break_redis_keys_are_refused(name):
    with pytest.raises(InvalidKey):
        job_id(name, "k")
