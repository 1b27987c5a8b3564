"""The services of reference/stacks under `queuesmith prove`: what a stack loses by default, and with our modules.

    python -m guide.stacks celery              both services under the faults of the card -> …/celery/results.json
    python -m guide.stacks celery kept lost    one of them, these faults only: their rows

`make sync` makes the tables of the pages from the results. Each stack is installed into build/stacks once.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from queuesmith.catalogue import ROOT
from queuesmith.prove.card import as_text
from queuesmith.prove.faults import FAULTS
from queuesmith.prove.run import Card, Options, prove
from queuesmith.prove.spec import load

SERVICES = ROOT / "reference" / "stacks"
BUILT = ROOT / "build" / "stacks"
TWINS = ("default", "kept")
# What a reader calls it, and its commands.
STACKS = {"celery": "Celery", "bullmq-ts": "BullMQ (TypeScript)", "asynq": "asynq (Go)", "sqs": "SNS + SQS"}
# The faults of the card, the same for every stack. `python -m guide.stacks STACK NAME…` runs any other.
CARD = (
    *("kill-at-effect", "kill-random", "kill-at-commit", "kill-all", "term", "freeze", "poison"),
    *("lost", "slow", "429", "outage", "refused", "failing", "twice", "burst"),
    *("redis-restart", "redis-kill", "redis-full", "broker-freeze", "store-away"),
)


class NotHere(Exception):
    """What the stack needs is not on this machine; the message says how to get it."""


@functools.cache
def install(stack: str) -> Path:
    """Its folder, ready to run."""
    source, built = SERVICES / stack, BUILT / stack
    if (source / "requirements.txt").is_file():
        python_with(source / "requirements.txt", built)
        return source
    tool = {"bullmq-ts": "npm", "asynq": "go"}[stack]
    if shutil.which(tool) is None:
        raise NotHere(f"{tool} is missing; install {'Node.js 20 or later' if tool == 'npm' else 'Go 1.24 or later'}")
    ignore = shutil.ignore_patterns("node_modules", "dist", "bin", "results.json")
    shutil.copytree(source, built, dirs_exist_ok=True, ignore=ignore)
    for command in _BUILD[stack]:
        if command[1] == "install" and _same(built / "package-lock.json", built / "node_modules" / ".locked"):
            continue
        done = subprocess.run(command, cwd=built, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise NotHere(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-600:]}")
        if command[1] == "install":
            shutil.copyfile(built / "package-lock.json", built / "node_modules" / ".locked")
    return built


_BUILD = {
    "bullmq-ts": (["npm", "install", "--ignore-scripts", "--no-save"], ["npx", "--no-install", "tsc"]),
    "asynq": (["go", "build", "-o", "bin/shop", "."], ["go", "build", "-o", "naive/bin/shop", "./naive"]),
}


def python_with(requirements: Path, built: Path) -> None:
    mark = built / "installed.txt"
    if _same(requirements, mark):
        return
    uv = Path(sys.executable).with_name("uv")
    for command in (
        [str(uv), "venv", "-q", "--clear", str(built)],
        [str(uv), "pip", "install", "-q", "--python", str(built / "bin" / "python"), "-r", str(requirements)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise NotHere(f"{requirements} cannot be installed: {done.stderr.strip()[-400:]}")
    shutil.copyfile(requirements, mark)


def _same(path: Path, other: Path) -> bool:
    return other.is_file() and path.read_bytes() == other.read_bytes()


def run(stack: str, twin: str, *only: str, seed: int = 1, quick: bool = False, keep: bool = False) -> Card:
    """The card of the service with the modules (`kept`), or of its twin as in tutorials (`default`)."""
    folder = install(stack)
    if twin == "default":
        folder = Path(shutil.copytree(SERVICES / stack / "naive", BUILT / stack / "naive", dirs_exist_ok=True))
        shutil.copy(SERVICES / stack / "prove.toml", folder)
    with _path(BUILT / stack / "bin"):
        card = prove(load(folder / "prove.toml"), Options(quick, seed=seed, only=only or CARD, keep=keep), _say)
    if card.evidence and not keep:
        shutil.rmtree(card.evidence, ignore_errors=True)
    return card


def _say(text: str, done: int, of: int) -> None:
    print(f"[{done}/{of}] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _path(first: Path) -> Iterator[None]:
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{first}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


# ---- results


def summary(card: Card) -> dict[str, Any]:
    return {
        "server": card.server,
        "seed": card.seed,
        "rows": {row.fault: [row.verdict, _outcome(row)] for row in card.rows if row.verdict != "not run"},
    }


def _outcome(row: Any) -> str:
    """`lost 4, duplicated 2`; for a fault that was survived, how long that took."""
    if row.broken:
        parts = []
        for breach in row.broken:
            count = re.match(r"\d+(?= (of|taken|still|failed|done|calls))", breach.measured)
            parts.append(f"{breach.invariant} {count[0]}" if count else breach.invariant)
        return ", ".join(dict.fromkeys(parts))
    if "done, and still on the queue" in row.measured:
        return "all done, an old message is left"
    took = re.search(r"recovered in ([\d.]+) s", row.measured)
    return f"{float(took[1]):.0f} s" if took and float(took[1]) >= 1 else ""


def results_of(stack: str) -> dict[str, Any]:
    path = SERVICES / stack / "results.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _cell(results: dict[str, Any], twin: str, fault: str) -> str:
    verdict, text = results.get(twin, {}).get("rows", {}).get(fault, ["–", ""])
    if verdict == "broken":
        return f"**{text}**"
    return f"{verdict}, {text}" if text else str(verdict)


def table(stack: str) -> str:
    """For the stack's page: the faults that its defaults do not survive, and how the modules did."""
    results = results_of(stack)
    if not set(TWINS) <= results.keys():
        return "Not measured yet."
    faults = [name for name in CARD if results["default"]["rows"].get(name, [""])[0] == "broken"]
    kept = results["kept"]["rows"]
    broken = [name for name in CARD if kept.get(name, [""])[0] == "broken"]
    lines = ["| fault | by default | with the modules |", "|---|---|---|"]
    lines += [f"| {name} | {_cell(results, 'default', name)} | {_cell(results, 'kept', name)} |" for name in faults]
    both = [results[twin]["rows"] for twin in TWINS]
    hit = [name for name in CARD if any(rows.get(name, [""])[0] in ("held", "broken") for rows in both)]
    unclear = sum(kept.get(name, [""])[0] == "unclear" for name in hit)
    also = f" ({unclear} unclear)" if unclear else ""
    lines += [
        "",
        f"Of {len(hit)} faults, the defaults break under {len(faults)}, the modules under {len(broken)}{also}.",
    ]
    return "\n".join(lines)


def matrix() -> str:
    """All stacks side by side, every fault."""
    complete = {stack: measured for stack in STACKS if set(TWINS) <= (measured := results_of(stack)).keys()}
    heads = [
        f"{STACKS[stack]}, {'default' if twin == 'default' else 'with the modules'}"
        for stack in complete
        for twin in TWINS
    ]
    lines = [f"| fault | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for name in CARD:
        cells = [_cell(results, twin, name) for results in complete.values() for twin in TWINS]
        lines.append(f"| {name}: {FAULTS[name].does} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    stack, *words = sys.argv[1:]
    only = [word for word in words if word not in TWINS]
    for twin in [word for word in TWINS if word in words] or TWINS:
        card = run(stack, twin, *only, keep=bool(only))
        print(as_text(card), flush=True)
        kept, new = results_of(stack), summary(card)
        if only and twin in kept:
            new["rows"] = {**kept[twin]["rows"], **new["rows"]}
        if not only or twin in kept:
            # A row to a line.
            text = json.dumps({**kept, twin: new}, indent=1, sort_keys=True) + "\n"
            text = re.sub(r"(?<=\[)\s+|\s+(?=\])|(?<=\",)\s+(?=\"[^\"]*\"\s*\])", "", text)
            (SERVICES / stack / "results.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
