"""The cards on the page `prove`: the output of `queuesmith prove --json`, cut to what is worth reading.

queuesmith prove SERVICE --seed 1 --json > card.json; python -m guide.prove_cards NAME card.json
python -m guide.prove_cards seeds 1 20        the known-good service once per seed, on a busy machine
"""

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "prove"
GOOD = Path(__file__).parents[1] / "tests" / "prove" / "services" / "parcels.toml"
MOST_STORY, MOST_STORIES = 330, 2


def cut(card: dict[str, Any]) -> dict[str, Any]:
    """Without what was not run, and with the stories of the first invariants."""
    seen: set[str] = set()
    kept: dict[str, Any] = {name: card[name] for name in ("name", "seed", "server", "workers")}
    kept["seconds"] = round(card["seconds"])
    kept |= {name: [row["fault"] for row in card["rows"] if row["verdict"] == name] for name in VERDICTS}
    kept["broken"] = []
    for row in card["rows"]:
        for breach in row["broken"]:
            new = len(seen) < MOST_STORIES and breach["invariant"] not in seen
            story = breach["story"][:MOST_STORY] if new else ""
            seen |= {breach["invariant"]} if story else set()
            kept["broken"].append([row["fault"], breach["invariant"], breach["measured"], story])
    return kept


def text_of(card: dict[str, Any]) -> str:
    """A line for each of the broken, and one for the rest."""
    head = {name: value for name, value in card.items() if name != "broken"}
    broken = ",\n".join(map(_short, card["broken"]))
    return f'{_short(head)[:-1]},"broken":[\n{broken}]}}\n'


def _short(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def cards(names: str) -> str:
    """`celery rq`: their cards as markdown."""
    return "\n\n".join(_markdown(json.loads((FOLDER / f"{name}.json").read_text())) for name in names.split())


def run_seeds(numbers: Iterable[int]) -> None:
    """Run the known-good service: how many rows of each verdict, and how busy the machine was."""
    from queuesmith.prove.run import Options, prove
    from queuesmith.prove.spec import load

    os.environ.setdefault("QUEUESMITH_PROVE_SCALE", "0.15")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    spec, file = load(GOOD), FOLDER / "seeds.json"
    promises = dataclasses.replace(spec.promises, recovery=30.0, wake=15.0, shutdown=30.0)
    for number in numbers:
        card = prove(dataclasses.replace(spec, promises=promises), Options(seed=number))
        result = {
            "seconds": round(card.seconds),
            "load": round(os.getloadavg()[1], 1),
            **Counter(row.verdict for row in card.rows),
        }
        known = json.loads(file.read_text()) if file.exists() else {}
        known[str(number)] = result
        lines = [f'"{seed}":{_short(known[seed])}' for seed in sorted(known, key=int)]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def seeds(_: str) -> str:
    """The runs of the known-good service in one sentence."""
    runs = list(json.loads((FOLDER / "seeds.json").read_text()).values())
    counts = sum((Counter({name: run.get(name, 0) for name in VERDICTS}) for run in runs), Counter[str]())
    loads = [run["load"] for run in runs]
    others = ", ".join(f"{counts[name]} {name}" for name in VERDICTS[1:])
    return (
        f"{len(runs)} seeds, at a load of {min(loads):.0f} to {max(loads):.0f} on two processors: "
        f"{counts['held']} rows held, {others}."
    )


VERDICTS = ("held", "broken", "unclear", "hit nothing")


def _markdown(card: dict[str, Any]) -> str:
    lines = [
        f"**{card['name']}**, {card['workers']} workers, {card['server']}, seed {card['seed']}, {card['seconds']} s"
    ]
    if card["broken"]:
        lines += ["", "| fault | broken | measured |", "|---|---|---|"]
        lines += [f"| `{fault}` | {name} | {_cell(measured)} |" for fault, name, measured, _ in card["broken"]]
    lines += [""]
    for verdict in sorted(set(VERDICTS) - {"broken"}):
        if card[verdict]:
            lines.append(f"- {verdict}: {', '.join(f'`{fault}`' for fault in card[verdict])}")
    stories = [story for *_, story in card["broken"] if story]
    if stories:
        lines += ["", "```text", *stories, "```"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:140]


if __name__ == "__main__":
    if sys.argv[1] == "seeds":
        run_seeds(range(int(sys.argv[2]), int(sys.argv[3]) + 1))
        sys.exit()
    name, path = sys.argv[1:]
    card = cut(json.loads(Path(path).read_text()) | {"name": name.removeprefix("recipe-")})
    (FOLDER / f"{name}.json").write_text(text_of(card))
