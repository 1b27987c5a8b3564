"""Words that readers stumbled over stay away; CONTRIBUTING says what to write instead."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# CHANGELOG: what was written then. CONTRIBUTING and this file name the words. Requests are in the words of others.
LEFT_OUT = ("CHANGELOG.md", "CONTRIBUTING.md", "tests/test_words.py", "tests/skills/triggers", "reference/samples/")
TEXTS = (".md", ".mmd", ".toml", ".html", ".js", ".yml", ".yaml")
CODE = (".py", ".ts", ".go")
# phrase -> what to write
EVERYWHERE = {
    r"behind (?:your|the|its|his|their) backs?": "in the background",
    r"belongs? into": "belongs in",
    r"the rest of the house": "other services",
    r"overslept": "a stale holder",
    r"a fit redis": "a suitable Redis",
    r"that is just there": "without any setup",
    r"taken off the missed": "removed from the missed list",
    r"let him ask": "let clients poll",
    r"whatever ails": "whatever state it is in",
    r"is no topic name": "is not a valid topic name",
    r"at most so many": "at most this many",
    r"for ever": "forever",
    r"anew": "again",
    r"attempts? unspent|spends? (?:no|an) attempt": "consumes no attempt",
    r"surely": "certainly, or leave it out",
    r"to be had": "available",
    r"_surely|_call_human|_of_the_last_life": "the noun of the domain",
}
IN_TEXTS = {r"doubled": "duplicated", r"(?:was|were|is|are|just) given back": "released"}


def stumbles(name, text):
    banned = EVERYWHERE | (IN_TEXTS if name.endswith(TEXTS) else {})
    every = re.compile(rf"(?<!\w)(?:{'|'.join(banned)})\b", re.IGNORECASE)  # one pass: there are many files
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}, write {better!r}"
        for match in every.finditer(text)
        for phrase, better in banned.items()
        if re.fullmatch(phrase, match[0], re.IGNORECASE)
    ]


def test_no_text_message_or_name_has_a_word_that_readers_stumbled_over():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [
        name
        for name in listed.stdout.splitlines()
        if name.endswith(TEXTS + CODE) and not name.startswith(LEFT_OUT) and (ROOT / name).is_file()
    ]
    assert len(names) > 500
    assert [line for name in names for line in stumbles(name, (ROOT / name).read_text())] == []


@pytest.mark.parametrize("name", ["x.md", "x.py"])
def test_a_stumble_is_found(name):
    assert stumbles(name, "it waits\nfor ever") == [f"{name}:2: 'for ever', write 'forever'"]
    assert bool(stumbles(name, "a doubled charge")) == (name == "x.md"), "a number may be doubled in code"
