"""The text of an error can be stored and sent anywhere, whatever the error is."""

from hypothesis import given
from hypothesis import strategies as st

from studyhall.patterns.core.errors import clean_text, describe


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@given(st.text(alphabet=st.characters(categories=None), max_size=50))
def test_clean_text_is_taken_by_postgresql_json_and_utf8(text):
    clean = clean_text(text + "\x00\ud800")
    assert "\x00" not in clean
    assert clean.encode()


def test_text_is_cut_with_a_mark_and_lines_stay_lines():
    assert clean_text("a\n\tb") == "a\n\tb"
    assert clean_text("a" * 9, limit=5) == "aaaaa…"


def test_an_error_without_a_message_is_named_by_its_class():
    assert describe(Mute()) == "Mute"
    assert describe(ValueError()) == "ValueError"
    assert describe(ValueError("a\x00b")) == "a\ufffdb"
