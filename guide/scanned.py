"""The scanner on public code bases: what it found, and which findings are wrong.

    python -m guide.scanned OWNER/NAME@COMMIT=FOLDER …     -> guide/scanned.json, how often each rule was found

Each finding was reviewed: `guide/scanned.toml` lists the wrong ones. `make sync` makes the page from both.
"""

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from queuesmith.catalogue import ROOT

SCANNER = ROOT / "skills" / "review-jobs" / "scripts" / "review_jobs.py"
RESULTS, JUDGED = ROOT / "guide" / "scanned.json", ROOT / "guide" / "scanned.toml"


def table() -> str:
    results, judged = json.loads(RESULTS.read_text()), tomllib.loads(JUDGED.read_text())
    lines = ["| code base | uses | read | findings | of these wrong |", "|---|---|---|---:|---:|"]
    listed = []
    for name, entry in judged.items():
        measured = results[name]
        wrong, commit = entry.get("wrong", {}), measured["commit"][:10]
        read = ", ".join(f"{count} {language}" for language, count in measured["read"].items())
        home = f"https://github.com/{name}"
        total = sum(measured["found"].values())
        lines.append(f"| [{name}]({home}/tree/{commit}) | {entry['uses']} | {read} | {total} | {len(wrong)} |")
        for place, why in wrong.items():
            rule, file = place.split(" ")
            path, _, line = file.partition(":")
            link = f"{home}/blob/{commit}/{path}#L{line}"
            listed.append(f"- `{rule}` [{Path(path).name}:{line}]({link}): {why}.")
    return "\n".join([*lines, "", *listed])


def main() -> int:
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for word in sys.argv[1:]:
        asked, _, folder = word.partition("=")
        name, _, commit = asked.partition("@")
        command = [sys.executable, "-I", str(SCANNER), folder, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        report = json.loads(done.stdout)
        counts = Counter(finding["rule"] for finding in report["findings"])
        results[name] = {"commit": commit, "read": report["read"]["files"], "found": dict(sorted(counts.items()))}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(results.items()))
    RESULTS.write_text(f"{{\n{rows}\n}}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
