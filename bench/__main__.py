"""The same work on the same Redis in the same run, for Queuesmith and its alternatives.

    python -m bench                                  quick: one round, everything small, minutes
    python -m bench --full                           three rounds; --publish: into bench/ too
    python -m bench --section latency,kills --peers queuesmith,celery

Each peer runs in its own environment under build/bench/envs, made at the first run. Writes results.json,
RESULTS.md and pictures into --out (build/bench) after every section, so that an interrupted run is not lost.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench import report, results, sections
from bench.lab import HERE, ORDER, ROOT, Lab, available
from bench.targets import KEPT, targets
from harness.redis import RedisServer

ROUNDS = 3


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="real sizes, three rounds (about 90 minutes)")
    parser.add_argument("--rounds", type=int, help="instead of 1 (quick) or 3 (full)")
    parser.add_argument(
        "--section",
        type=_some(sections.NAMES),
        help=f"a,b,… of: {', '.join(sections.NAMES)} (default: all; quick without {', '.join(sections.FULL_ONLY)})",
    )
    parser.add_argument("--peers", type=_some(ORDER), default=ORDER, help="a,b,… of: " + ", ".join(ORDER))
    parser.add_argument(
        "--brief", type=_some(ORDER), default=(), help="for these peers only the rate of no-op jobs, to save time"
    )
    parser.add_argument(
        "--before", type=Path, help="results.json of an older commit on this machine, for rates that must not fall"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="output folder")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the report")
    parser.add_argument(
        "--keep", action="store_true", help="keep the sections and peers of bench/results.json that are not run now"
    )
    parser.add_argument(
        "--publish", action="store_true", help="also replace bench/results.json, from which the guide draws its page"
    )
    return parser.parse_args(arguments)


def _some(known: tuple[str, ...]):  # type: ignore[no-untyped-def]
    def chosen(text: str) -> tuple[str, ...]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return tuple(name for name in known if name in names)

    return chosen


def main() -> int:
    given = options()
    chosen = given.section or [name for name in sections.NAMES if given.full or name not in sections.FULL_ONLY]
    rounds = given.rounds or (ROUNDS if given.full else 1)
    peers, missing = available(given.peers)
    for sentence in missing:
        print(f"going on without {sentence}", file=sys.stderr)
    began = time.monotonic()
    server = RedisServer.start()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            lab = Lab(peers, quick=not given.full, server=server, folder=Path(folder), brief=given.brief)
            run = results.begin(lab, missing, rounds)
            if given.before:
                run["before"] = results.before(given.before, KEPT)
            earlier: results.Results = {"peers": {}, "sections": {}}
            if given.keep:
                earlier = results.keep(run, HERE / "results.json", chosen)
            for name in chosen:
                if _section(lab, run, name, rounds):
                    results.keep_rows(run, earlier, name)
                _write(run, given.out)
    finally:
        server.stop()
    seconds = round(time.monotonic() - began)
    if given.publish:
        shutil.copyfile(given.out / "results.json", HERE / "results.json")
    print(json.dumps(run, indent=1) if given.json else (given.out / "RESULTS.md").read_text())
    kept = [target for target in targets(run) if target.verdict != "not measured"]
    met = sum(target.met for target in kept)
    print(f"{met} of {len(kept)} targets met, {seconds} s: {given.out}/RESULTS.md", file=sys.stderr)
    return 0


def _section(lab: Lab, run: results.Results, name: str, rounds: int) -> bool:
    module = sections.load(name)
    turns = min(rounds, getattr(module, "ROUNDS", rounds))
    lab.failures = {}
    run["sections"].pop(name, None)
    began, before = time.monotonic(), results.cpu_times()
    for turn in range(1, turns + 1):
        lab.round, lab.prefix = turn, f"{name} {turn}/{turns}: "
        try:
            results.add(run, name, lab, module.measure(lab))
        except Exception as error:  # the other sections are still worth having
            lab.say(f"failed: {error!r}")
            run.setdefault("errors", {})[name] = repr(error)
            return False
    run["sections"][name] |= {"seconds": round(time.monotonic() - began), "stolen": results.stolen(before)}
    run["sections"] = {known: run["sections"][known] for known in sections.NAMES if known in run["sections"]}
    return True


def _write(run: results.Results, out: Path) -> None:
    results.save(run, out / "results.json")
    (out / "RESULTS.md").write_text(report.markdown(run))


if __name__ == "__main__":
    sys.exit(main())
