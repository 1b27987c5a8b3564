"""The cards on the page `prove`: what `queuesmith prove --json` said, cut to what is worth reading.

queuesmith prove SERVICE --quick --seed 1 --json > card.json; python -m guide.prove_cards NAME card.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["cards"]

FOLDER = Path(__file__).parent / "prove"
MOST_STORY = 330


def cut(card: dict[str, Any]) -> dict[str, Any]:
    """Without what was not run, and with one story per invariant."""
    told: set[str] = set()
    rows = []
    for row in card["rows"]:
        if row["verdict"] == "not run":
            continue
        broken = []
        for one in row["broken"]:
            story = "" if one["invariant"] in told else one["story"][:MOST_STORY]
            told.add(one["invariant"])
            broken.append({"invariant": one["invariant"], "measured": one["measured"], "story": story})
        kept = {"fault": row["fault"], "verdict": row["verdict"]}
        rows.append(kept | ({"broken": broken} if broken else {}))
    head = {name: card[name] for name in ("name", "seed", "server", "workers", "verdict")}
    return head | {"seconds": round(card["seconds"]), "rows": rows}


def cards(names: str) -> str:
    """`celery rq`: their cards as markdown."""
    return "\n\n".join(_markdown(json.loads((FOLDER / f"{name}.json").read_text())) for name in names.split())


def _markdown(card: dict[str, Any]) -> str:
    by_verdict: dict[str, list[str]] = {}
    for row in card["rows"]:
        by_verdict.setdefault(row["verdict"], []).append(f"`{row['fault']}`")
    lines = [
        f"**{card['name']}**, {card['workers']} workers, {card['server']}, seed {card['seed']}, {card['seconds']} s"
    ]
    broken = [(row["fault"], one) for row in card["rows"] for one in row.get("broken", [])]
    if broken:
        lines += ["", "| fault | broken | measured |", "|---|---|---|"]
        lines += [f"| `{fault}` | {one['invariant']} | {_cell(one['measured'])} |" for fault, one in broken]
    lines += [""] + [
        f"- {verdict}: {', '.join(by_verdict[verdict])}"
        for verdict in sorted(by_verdict)
        if verdict != "broken"
    ]
    stories = [one["story"] for _, one in broken if one["story"]]
    if stories:
        lines += ["", "```text", *stories[:2], "```"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:140]


if __name__ == "__main__":
    name, path = sys.argv[1:]
    card = cut(json.loads(Path(path).read_text()))
    (FOLDER / f"{name}.json").write_text(json.dumps(card, indent=1) + "\n")
