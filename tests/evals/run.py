"""Does a model with the plugin write what survives? The answer is a service, graded by `queuesmith prove`.

    python tests/evals/run.py [CASE…]    no model: every grader must clear `good` and catch `start`
    python tests/evals/run.py --with "claude -p --plugin-dir $PWD --permission-mode acceptEdits" [CASE…]

With `--with`, that command is run in a folder with the case's files, its prompt as the last argument, on your account.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from guide import stacks  # noqa: E402
from queuesmith.prove.run import Card, Options, prove  # noqa: E402
from queuesmith.prove.spec import load  # noqa: E402

CASES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("graded.toml").read_text())
NOT_SHOWN = shutil.ignore_patterns("naive", "node_modules", "results.json", "prove.toml", "*.js")
Ask = Callable[[Path, str], str]


def laid_out(case: dict[str, Any], source: str, folder: Path) -> Path:
    """The files of `source`, and what the stack has installed."""
    stack = case["stack"]
    if stack == "django":
        stacks.python_with(ROOT / "tests" / "evals" / "django" / "requirements.txt", stacks.BUILT / stack)
    elif stack != "python":
        stacks.install(stack)
    shutil.copytree(ROOT / source, folder, ignore=NOT_SHOWN)
    if stack == "bullmq-ts":
        (folder / "node_modules").symlink_to(stacks.BUILT / stack / "node_modules")
        for name in ("package.json", "tsconfig.json"):
            shutil.copy(stacks.SERVICES / stack / name, folder)
    return folder


def graded(case: dict[str, Any], folder: Path) -> list[str]:
    """What is broken in the service in `folder`, if anything."""
    text = (ROOT / case["good"] / "prove.toml").read_text()
    (folder / "prove.toml").write_text(text.replace('"../.."', json.dumps(str(ROOT / "reference"))))
    if case["stack"] == "bullmq-ts":
        built = subprocess.run(["npx", "--no-install", "tsc"], cwd=folder, capture_output=True, text=True, check=False)
        if built.returncode:
            return [f"tsc: {built.stdout.strip()[-300:]}"]
    programs = Path(sys.executable).parent if case["stack"] == "python" else stacks.BUILT / case["stack"] / "bin"
    with stacks._path(programs):
        card: Card = prove(load(folder / "prove.toml"), Options(only=case["faults"]))
    if card.evidence:
        shutil.rmtree(card.evidence, ignore_errors=True)
    broken = [f"{row.fault}: {miss.invariant}, {miss.measured}" for row in card.broken for miss in row.broken]
    return broken or [f"{row.fault}: {row.verdict}" for row in card.rows if row.verdict != "held"]


def skills_called(transcript: str) -> set[str]:
    """The skills of ours in what a client wrote with `--output-format stream-json`."""
    called = set()
    for line in transcript.splitlines():
        try:
            content = json.loads(line)["message"]["content"]
        except (ValueError, KeyError, TypeError):
            continue
        for part in content if isinstance(content, list) else []:
            if part.get("type") == "tool_use" and part.get("name") == "Skill":
                called.add(str(part["input"].get("skill", "")).removeprefix("queuesmith:"))
    return called & {path.parent.name for path in ROOT.glob("skills/*/SKILL.md")}


def asked(command: str) -> Ask:
    def ask(folder: Path, prompt: str) -> str:
        words = [*shlex.split(command), "--output-format", "stream-json", "--verbose", prompt]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
        return done.stdout

    return ask


def run(name: str, ask: Ask, folder: Path) -> list[str]:
    """A model's turn at a case: what is wrong with its work."""
    case = CASES[name]
    if "good" not in case:
        return [f"called {skill}" for skill in skills_called(ask(folder, case["prompt"]))]
    service = laid_out(case, case["start"], folder / "service")
    called = skills_called(ask(service, case["prompt"]))
    return graded(case, service) + ([] if case["skill"] in called else [f"did not call {case['skill']}"])


def checked(name: str, folder: Path) -> list[str]:
    """Without a model: what is wrong with the case itself."""
    case = CASES[name]
    if "good" not in case:
        return []
    wrong = [f"the good one fails: {why}" for why in graded(case, laid_out(case, case["good"], folder / "good"))]
    if not graded(case, laid_out(case, case["start"], folder / "start")):
        wrong.append("the naive one passes")
    return wrong


def main(words: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", choices=[[], *CASES], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--with", dest="command", metavar="COMMAND", help="the client that answers, on your account")
    options = parser.parse_args(None if words is None else list(words))
    failed = 0
    for name in options.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            ask = asked(options.command) if options.command else None
            wrong = run(name, ask, Path(folder)) if ask else checked(name, Path(folder))
        failed += bool(wrong)
        print(f"{'failed' if wrong else 'passed'}  {name}" + "".join(f"\n        {why}" for why in wrong), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sys.exit(main())
