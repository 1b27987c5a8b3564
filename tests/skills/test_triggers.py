"""Would the description call the skill? A lexical judge over 120 requests: no model, no surprise.

A description covers a request as far as it has the request's telling words; how telling a word is, is learnt from the
sentences of this repository's own pages: "priority queue with heapq" is half about something else. Half of the table
was used to tune the descriptions, the other half was written by somebody who had not read them and is only counted.
"""

import math
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from guide import quotes

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SKILLS = sorted(path.parent.name for path in (ROOT / "skills").glob("*/SKILL.md"))
ENOUGH = 0.3  # the share of a request that a description must cover to call its skill
MOST = 3.5  # the weight of a word that we never use: people tell stories around their question
SUFFIXES = re.findall(r"\w+", "ations ation ings ing ers er ied ies ed es ly s e y")
# Common everywhere; our pages are too few to learn that from.
EMPTY = frozenset(
    re.findall(
        r"\w+",
        "a about after again all an and any are as at be because been before by can could did do does each "
        "every for from get gets got had has have he help here how i if in into is it its just let lets made "
        "make makes may me must my need needs no nor not of on one or our out over per please she should "
        "since so some still than that the their them then there they this to too two under until up us use "
        "used using very want wants was we were what when where which while who why will with would you your ",
    )
)


def stem(word):
    for suffix in SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            return word[: -len(suffix)]
    return word


def words(text):
    plain = text.lower().replace("e-mail", "email").replace("'s", "").replace("server-sent", "server sent")
    return {stem(word) for word in re.findall(r"[a-z]+|\d+", plain) if word not in EMPTY}


@cache
def occurrences():
    """In how many sentences of the pages each stem stands, and how many sentences there are."""
    texts = [path.read_text() for path in (ROOT / "skills").rglob("*.md")]
    sentences = [part for text in texts for part in re.split(r"[.\n|:;]\s", text) if len(part) > 20]
    return Counter(word for sentence in sentences for word in words(sentence)), len(sentences)


def weight(word):
    seen, sentences = occurrences()
    return min(MOST, math.log(1 + sentences / (1 + seen[word])))


@cache
def described(skill):
    """Words that call it, words it is not for."""
    text = quotes.description((ROOT / "skills" / skill / "SKILL.md").read_text())
    calls, _, not_for = text.partition(" Not for ")
    called = words(skill.replace("-", " ") + " " + calls)
    return called, words(not_for) - called


def scores(request):
    asked = words(request)
    whole = sum(map(weight, asked)) or 1.0
    covered = {}
    for skill in SKILLS:
        calls, not_for = described(skill)
        share = sum(weight(word) for word in asked & calls)
        covered[skill] = round((share - sum(weight(word) for word in asked & not_for)) / whole, 3)
    return covered


def called(request):
    covered = scores(request)
    best = max(covered, key=lambda skill: covered[skill])
    return best if covered[best] >= ENOUGH else "none"


def table(name):
    read = tomllib.loads((HERE / name).read_text())
    return [(wanted, request) for wanted, requests in read.items() for request in requests]


@pytest.mark.parametrize(("name", "share"), [("triggers.toml", 0.95), ("triggers-unseen.toml", 0.75)])
def test_requests_call_their_skill(name, share, capsys):
    """The judge knows words, not meaning: what it leaves uncalled a model may well call. It must not get worse."""
    requests = table(name)
    wrong = [(wanted, called(request), request) for wanted, request in requests if called(request) != wanted]
    silent = [request for wanted, request in requests if wanted == "none" and called(request) == "none"]
    foreign = sum(wanted == "none" for wanted, _ in requests)
    with capsys.disabled():
        print(f"\n{name}: {len(requests) - len(wrong)} of {len(requests)} right, {len(silent)} of {foreign} left alone")
    assert len(requests) >= 60
    assert len(wrong) <= (1 - share) * len(requests), wrong if "unseen" not in name else len(wrong)
    assert len(silent) >= 0.8 * foreign
