"""axe-core, the accessibility checker, installed once into build/axe."""

import fcntl
import json
import shutil
import subprocess
from typing import Any

from .missing import missing
from .processes import ROOT

VERSION = "4.14.0"


def axe_source() -> str:
    """The script to evaluate in a page. Without npm: a skip that says how to get it."""
    home = ROOT / "build" / "axe"
    source = home / "node_modules" / "axe-core" / "axe.min.js"
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes run side by side
        if not source.exists():
            if not shutil.which("npm"):
                missing("npm", "install Node.js and npm, with a package registry in reach")
            package = {"private": True, "dependencies": {"axe-core": VERSION}}
            (home / "package.json").write_text(json.dumps(package))
            npm = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
            done = subprocess.run(npm, cwd=home, capture_output=True, text=True, timeout=180, check=False)
            if done.returncode:
                missing("axe-core", f"npm needs a package registry in reach ({done.stderr[-200:]})")
    return source.read_text()


def violations(page: Any, impacts: tuple[str, ...] = ("minor", "moderate", "serious", "critical")) -> list[str]:
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert len(result["passes"]) > 10, "the checker checked nothing"
    return [
        f"{rule['id']} ({rule['impact']}) at {[node['target'] for node in rule['nodes']][:3]}"
        for rule in result["violations"]
        if rule["impact"] in impacts
    ]
