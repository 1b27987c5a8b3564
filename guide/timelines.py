"""Timelines: a fault moved along the steps of a pattern, and what the usual version and ours make of it.

Without scripts it is a list of all moments; assets/timeline.js makes one slider of it. Both read the same table.
"""

from __future__ import annotations

import functools
import json
import tomllib
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["timeline", "timelines"]

LANES = ("usual", "ours")


@functools.cache
def timelines() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).with_name("timelines.toml")).read_text())


def timeline(ident: str) -> str:
    """The figure of a pattern, or nothing when it has none."""
    given = timelines().get(ident)
    if given is None:
        return ""
    lanes = {name: {"title": given[name][0], "steps": given[name][1:]} for name in LANES}
    moments = [{"after": place} | moment for place, moment in enumerate(given["moment"])]
    listed = "".join(
        f"<li><strong>{escape(moment['at'])}</strong>"
        + "".join(_verdict(lanes[name]["title"], moment[name]) for name in LANES)
        + "</li>"
        for moment in moments
    )
    data = json.dumps({"fault": given["fault"], "lanes": lanes, "moments": moments}, ensure_ascii=False)
    safe = data.replace("<", "\\u003c")
    return (
        f'<figure class="qs-timeline" data-timeline="{escape(ident)}">'
        f"<figcaption>Move the {escape(given['fault'])}: what happens next?</figcaption>"
        f'<ol class="qs-stepped">{listed}</ol>'
        f'<script type="application/json">{safe}</script></figure>'
    )


def _verdict(title: str, verdict: list[str]) -> str:
    kind, word, text = (escape(part) for part in verdict)
    return f'<p>{escape(title)}: <b class="qs-{kind}">{word}</b>. {text}</p>'
