"""Node.js with BullMQ, installed once into build/: the other side of the interoperability tests."""

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .missing import missing

ROOT = Path(__file__).resolve().parents[2]
BULLMQ = "6.7.0"
PACKAGES = {"bullmq": BULLMQ, "ioredis": "5.11.1"}  # ioredis is only an optional peer of bullmq 6: name it
BOARD = {f"@bull-board/{part}": "9.10.1" for part in ("api", "ui", "express")} | {"express": "5.2.1"}


def install(folder: str, packages: dict[str, str]) -> Path | None:
    """Directory with node_modules, or None when node or npm is absent or the packages cannot be fetched."""
    if not shutil.which("node") or not shutil.which("npm"):
        return None
    home = ROOT / "build" / folder
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes run side by side
        if not (home / "node_modules" / ".ready").exists():
            package = {"private": True, "type": "module", "dependencies": packages}
            (home / "package.json").write_text(json.dumps(package))
            npm = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
            if subprocess.run(npm, cwd=home, capture_output=True, timeout=180, check=False).returncode:
                return None
            (home / "node_modules" / ".ready").touch()
    return home


@pytest.fixture(scope="session")
def node_home() -> Path:
    """Run `node script.mjs` with this as working directory and NODE_PATH: `import "bullmq"` works there."""
    return _wanted(install("node", PACKAGES), f"bullmq {BULLMQ}")


@pytest.fixture(scope="session")
def board_home() -> Path:
    """The same with bull-board, the dashboard that most users of BullMQ have."""
    return _wanted(install("bull-board", PACKAGES | BOARD), "bull-board")


def _wanted(home: Path | None, what: str) -> Path:
    if home is None:
        missing(f"Node.js with {what}", "install node >= 20 and npm, with a package registry in reach")
    assert os.access(home, os.R_OK)
    return home
