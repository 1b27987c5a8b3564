"""The results of a run as one JSON document: what was measured where, with the rounds of every figure."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.figures import Ratio, Value, ratio

if TYPE_CHECKING:  # the guide reads results without a laboratory
    from bench.lab import Lab, Peer

Results = dict[str, Any]
LIBRARIES = ("hiredis", "uvloop", "bullmq", "faststream")


def begin(lab: Lab, missing: Sequence[str], rounds: int) -> Results:
    with lab.server.client() as client:
        server = client.info("server")
    name = "valkey" if "valkey_version" in server else "redis"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "mode": "quick" if lab.quick else "full",
        "rounds": rounds,
        "machine": {
            "cpus": os.cpu_count(),
            "processor": _processor(),
            "system": f"{platform.system()} {platform.release()}",
            "load_at_start": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            name: str(server.get("valkey_version") or server["redis_version"]),
            "redis-py": version("redis"),
            **{library: version(library) for library in LIBRARIES},
        },
        "peers": {peer.id: _about(peer) for peer in lab.peers},
        "missing": list(missing),
        "sections": {},
    }


def keep(results: Results, path: Path, measured: Sequence[str]) -> Results:
    """Keep the sections of an earlier run of the same kind that are not `measured` now, and their peers."""
    if not path.exists():
        return {"peers": {}, "sections": {}}
    earlier: Results = json.loads(path.read_text())
    if earlier["mode"] != results["mode"]:
        raise SystemExit(f"{path} is a {earlier['mode']} run: not to be mixed with a {results['mode']} one")
    made = f"{earlier['date']}, {earlier['machine']['cpus']} × {earlier['machine']['processor']}"
    results["peers"] = {
        name: results["peers"].get(name) or about for name, about in (earlier["peers"] | results["peers"]).items()
    }
    for name, section in earlier["sections"].items():
        section.setdefault("made", made)
        if name not in measured:
            results["sections"][name] = section
    return earlier


def keep_rows(results: Results, earlier: Results, name: str) -> None:
    """The rows of peers that this run did not measure, after those it did; the report says when and where they were
    measured, and takes no ratio between the two."""
    section, before = results["sections"][name], earlier["sections"].get(name, {"rows": {}})
    for row, figures in before["rows"].items():
        if row in earlier["peers"] and row not in section["rows"]:
            section["rows"][row] = figures
            made = made_earlier(before, row) or before["made"]
            section.setdefault("earlier", {}).setdefault(made, []).append(row)


def before(path: Path, figures: Iterable[tuple[str, str, str]]) -> dict[str, float]:
    """The medians of these figures in another run: `section/row/figure` -> value."""
    other = json.loads(path.read_text())
    medians = {"/".join(figure): median(other, *figure) for figure in figures}
    return {name: value for name, value in medians.items() if value is not None}


def cpu_times() -> list[int]:
    """Of all processors, in ticks, as Linux counts them; empty elsewhere."""
    path = Path("/proc/stat")
    return [int(ticks) for ticks in path.read_text().split("\n", 1)[0].split()[1:9]] if path.exists() else []


def stolen(since: Sequence[int]) -> int:
    """Per cent of the time since then in which the host gave this machine's processors to others."""
    spent = [after - earlier for earlier, after in zip(since, cpu_times(), strict=True)]
    return round(100 * spent[7] / (sum(spent) - spent[3])) if len(spent) == 8 and sum(spent) > spent[3] else 0


def _about(peer: Peer) -> dict[str, str]:
    return {"title": peer.title, "version": f"{peer.package} {peer.version()}", "settings": peer.settings}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def add(results: Results, name: str, lab: Lab, round_: dict[str, dict[str, Value]]) -> None:
    """One round of a section: a figure is the list of its rounds, or words where there is no number."""
    section = results["sections"].setdefault(name, {"rounds": 0, "rows": {}, "failed": {}})
    section["rounds"] += 1
    section["failed"] |= lab.failures
    for row, figures in round_.items():
        kept = section["rows"].setdefault(row, {})
        for key, value in figures.items():
            if isinstance(value, int | float):
                rounds = kept.get(key)
                kept[key] = [*rounds, value] if isinstance(rounds, list) else [value]
            elif value is not None:
                kept.setdefault(key, value)


def save(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact(json.dumps(results, indent=1, ensure_ascii=False, separators=(",", ":"))) + "\n")


def _compact(text: str) -> str:
    """A row's figures on one line: the committed file stays small, and its diffs readable."""
    return re.sub(r"\n {4,}", "", text)


# ---- reading


def values(results: Results, section: str, row: str, key: str) -> list[float]:
    rounds = figure(results, section, row, key)
    return list(rounds) if isinstance(rounds, list) else []


def figure(results: Results, section: str, row: str, key: str) -> list[float] | str | None:
    result: list[float] | str | None
    result = results.get("sections", {}).get(section, {}).get("rows", {}).get(row, {}).get(key)
    return result


def median(results: Results, section: str, row: str, key: str) -> float | None:
    rounds = values(results, section, row, key)
    return statistics.median(rounds) if rounds else None


def made_earlier(section: dict[str, Any], row: str) -> str | None:
    """When and where a row was measured that is kept from an earlier run."""
    return next((made for made, rows in section.get("earlier", {}).items() if row in rows), None)


def compare(results: Results, section: str, key: str, one: str, other: str) -> Ratio | None:
    """`one` / `other`, over rounds of the same run that both have."""
    measured = results.get("sections", {}).get(section, {})
    if made_earlier(measured, one) != made_earlier(measured, other):
        return None
    values_of_one, values_of_other = values(results, section, one, key), values(results, section, other, key)
    return ratio(values_of_one, values_of_other)


def limit(results: Results, kind: str) -> float | None:
    """What this Redis can do at most: calls per second of BullMQ's `add` or `work` script."""
    rates = [median(results, "ceiling", kind, key) for key in ("P1", "P16")]
    known = [value for value in rates if value is not None]
    return max(known) if known else None
