"""What the proofs measured, one JSON file per pattern; the guarantee cards come from these."""

import contextlib
import datetime
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from .processes import ROOT
from .redis import server_binary

T = TypeVar("T")


def full() -> bool:
    """True in the full fault suite (`make faults`), False in the quick one of every test run."""
    return os.environ.get("QUEUESMITH_FULL") == "1"


def record(pattern: str, name: str, proof: str, seed: int, figures: dict[str, Any]) -> Path:
    """Merge figures into `<figures directory>/<pattern>.json`, which says once what a run used; safe under xdist."""
    directory = ROOT / os.environ.get("QUEUESMITH_FIGURES", "build/figures")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{pattern}.json"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    run = f"{today} {'full' if full() else 'quick'} {seed}"
    # The directory is the lock: no lock file is left beside the figures.
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = json.loads(path.read_text()) if path.exists() else {}
        if "runs" not in merged:  # of an older form
            merged = {"runs": {}}
        runs = merged.pop("runs")
        merged = {each: {"run": next(iter(runs)), **entry} for each, entry in merged.items()}
        merged[name] = {"run": run, "proof": proof, "figures": figures}
        used = {entry["run"] for entry in merged.values()}
        runs = {each: shown for each, shown in {**runs, run: versions()}.items() if each in used}
        for entry in merged.values() if len(runs) == 1 else ():
            del entry["run"]  # not said again for each
        merged["runs"] = runs
        with tempfile.NamedTemporaryFile("w", dir=directory, suffix=".tmp", delete=False) as out:
            close = functools.partial(json.dumps, sort_keys=True, separators=(",", ":"))
            rows = (f'"{name}":{close(merged[name])}' for name in sorted(merged))
            out.write("{\n" + ",\n".join(rows) + "\n}\n")
        Path(out.name).chmod(0o644)
        Path(out.name).replace(path)
    finally:
        os.close(lock)
    return path


@functools.cache
def versions() -> str:
    known = {"python": platform.python_version(), "cpus": str(os.cpu_count())}
    for package in ("bullmq", "redis"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[package] = importlib.metadata.version(package)
    shown = subprocess.run([server_binary(), "--version"], capture_output=True, text=True, check=False).stdout
    if match := re.search(r"^(\w+).*?\bv=([\d.]+)", shown):
        known["server"] = f"{match[1]} {match[2]}"
    return ", ".join(f"{name} {version}" for name, version in sorted(known.items()))


@pytest.fixture
def figures(request: pytest.FixtureRequest, seed: int) -> Callable[..., Path]:
    """`figures("pattern-id", name="kills", jobs=1000, lost=0)`: keep what this proof measured."""

    def keep(pattern: str, *, name: str, **numbers: Any) -> Path:
        return record(pattern, name, request.node.name, seed, numbers)

    return keep


@pytest.fixture(scope="session")
def scale() -> Callable[[T, T], T]:
    """`scale(quick, full)`: the size of a proof in every test run, and in `make faults`."""
    return lambda quick, full_size: full_size if full() else quick


@pytest.fixture(scope="session")
def _run_seed() -> int:
    return int(os.environ["QUEUESMITH_SEED"])


@pytest.fixture
def seed(_run_seed: int) -> int:
    """The run's random seed, printed with a failing test. Repeat a run with QUEUESMITH_SEED=<it>."""
    print(f"QUEUESMITH_SEED={_run_seed}")
    return _run_seed
