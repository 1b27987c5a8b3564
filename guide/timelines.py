"""Timelines: a fault at each step of a pattern, and what the usual version and ours make of it.

Without scripts it is a list of all moments; assets/timeline.js turns it into a slider. Both use the same table.
"""

import functools
import json
import tomllib
from html import escape
from pathlib import Path
from typing import Any

LANES = ("usual", "ours")


@functools.cache
def timelines() -> dict[str, dict[str, Any]]:
    given = tomllib.loads((Path(__file__).with_name("timelines.toml")).read_text())
    return {ident: derived(entry) for ident, entry in given.items()}


def derived(entry: dict[str, Any]) -> dict[str, Any]:
    """A pattern's lanes and moments: each verdict follows from what is durable when the fault hits."""
    lanes = {name: [step.partition(" | ") for step in entry[name]] for name in LANES}
    moments = []
    for place, at in enumerate(entry["at"]):
        reached = entry["reached"][place] if "reached" in entry else place
        verdicts = {name: verdict(entry["then"], lanes[name][: place + 1]) for name in LANES}
        moments.append({"at": at, "after": reached, "hit": reached == place} | verdicts)
    titled = {name: {"title": lane[0][0], "steps": [step[0] for step in lane[1:]]} for name, lane in lanes.items()}
    return {"fault": entry["fault"], "lanes": titled, "moments": moments}


def verdict(then: list[list[str]], done: list[tuple[str, str, str]]) -> list[str]:
    durable = {fact for _, _, facts in done for fact in facts.split()}
    for needed, *outcome in then:
        if all((fact.lstrip("!") in durable) != fact.startswith("!") for fact in needed.split()):
            return outcome
    raise ValueError(f"no row of `then` for {durable}")


def timeline(ident: str) -> str:
    """The figure of a pattern; empty if it has none."""
    given = timelines().get(ident)
    if given is None:
        return ""
    listed = "".join(
        f"<li><strong>{escape(moment['at'])}</strong>"
        + "".join(_verdict(given["lanes"][name]["title"], moment[name]) for name in LANES)
        + "</li>"
        for moment in given["moments"]
    )
    safe = json.dumps(given, ensure_ascii=False).replace("<", "\\u003c")
    return (
        f'<figure class="qs-timeline" data-timeline="{escape(ident)}">'
        f"<figcaption>Move the {escape(given['fault'])}: what happens next?</figcaption>"
        f'<ol class="qs-stepped">{listed}</ol>'
        f'<script type="application/json">{safe}</script></figure>'
    )


def _verdict(title: str, outcome: list[str]) -> str:
    kind, word, text = (escape(part) for part in outcome)
    return f'<p>{escape(title)}: <b class="qs-{kind}">{word}</b>. {text}</p>'
