"""Would the description call the skill? A lexical score over 40 requests: no model, no surprise."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((Path(__file__).parent / "triggers.toml").read_text())
STOP = set(
    re.findall(
        r"\w+",
        "a an the and or of to in on for with by from at is are was be it its this that our my we i you how do does "
        "not no nor use which when what must some any all as into per every one up out our them they can get gets",
    )
)
ENOUGH = 1.8  # below it a skill would not be called: one telling word is not enough


def words(text: str) -> set[str]:
    found = re.findall(r"[a-z]+|\d+", text.lower().replace("e-mail", "email").replace("'s", ""))
    return {stem(word) for word in found if word not in STOP}


def stem(word: str) -> str:
    for suffix in (
        "ations",
        "ation",
        "ings",
        "ing",
        "ers",
        "er",
        "ied",
        "ies",
        "ed",
        "es",
        "ly",
        "s",
        "e",
        "y",
    ):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            return word[: -len(suffix)]
    return word


def described() -> dict[str, tuple[set[str], set[str]]]:
    """skill -> (words that call it, words it is not for)"""
    found = {}
    for path in sorted((ROOT / "skills").glob("*/SKILL.md")):
        match = re.search(r"^description: (.*)$", path.read_text(), re.MULTILINE)
        assert match
        calls, _, not_for = match[1].partition(" Not for ")
        found[path.parent.name] = (words(path.parent.name.replace("-", " ") + " " + calls), words(not_for))
    return found


SKILLS = described()


def weight(word: str) -> float:
    """A word that calls every skill tells nothing."""
    users = sum(word in calls for calls, _ in SKILLS.values())
    return math.log(1 + len(SKILLS) / users) if users else 0.0


def scores(request: str) -> dict[str, float]:
    asked = words(request)
    return {
        skill: sum(weight(word) for word in asked & calls)
        - 0.8 * sum(1 for word in asked & (not_for - calls))
        for skill, (calls, not_for) in SKILLS.items()
    }


def test_table_is_large_enough() -> None:
    assert sum(len(TABLE[skill]) for skill in SKILLS) >= 40


@pytest.mark.parametrize(("skill", "request_"), [(skill, text) for skill in SKILLS for text in TABLE[skill]])
def test_request_calls_its_skill(skill: str, request_: str) -> None:
    found = scores(request_)
    best = max(found, key=lambda name: found[name])
    assert best == skill, found
    assert found[skill] >= ENOUGH, found


@pytest.mark.parametrize("request_", TABLE["none"])
def test_unrelated_request_calls_nothing(request_: str) -> None:
    assert max(scores(request_).values()) < ENOUGH, scores(request_)


@pytest.mark.parametrize(("request_", "wrong"), TABLE["near-misses"])
def test_near_miss_goes_elsewhere(request_: str, wrong: str) -> None:
    found = scores(request_)
    assert found[wrong] < max(found.values()), found
