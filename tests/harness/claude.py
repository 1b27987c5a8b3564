"""The real Claude Code client: installed once into build/claude, run offline, without a login, in a home of its own."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from .missing import missing

ROOT = Path(__file__).resolve().parents[2]
VERSION = "2.1.325"  # a platform's package holds a native binary: npm installs it, but it runs without Node
MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
QUIET = {
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


def install_claude() -> Path | None:
    """Path of the client, or None when npm is absent or the package cannot be fetched."""
    machine = MACHINES.get(platform.machine().lower())
    if machine is None or platform.system() not in ("Linux", "Darwin") or not shutil.which("npm"):
        return None
    package = f"@anthropic-ai/claude-code-{platform.system().lower()}-{machine}"
    home = ROOT / "build" / "claude"
    home.mkdir(parents=True, exist_ok=True)
    binary, ready = home / "node_modules" / package / "claude", home / f".ready-{VERSION}"
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes run side by side
        if not ready.exists():
            (home / "package.json").write_text(json.dumps({"private": True, "dependencies": {package: VERSION}}))
            npm = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
            if subprocess.run(npm, cwd=home, capture_output=True, timeout=240, check=False).returncode:
                return None
            ready.touch()
    return binary if os.access(binary, os.X_OK) else None


@dataclass(frozen=True)
class ClaudeClient:
    """Commands of the client under an isolated home; nothing of the user's own set-up is read or changed."""

    binary: Path
    home: Path

    def run(self, *args: str | Path, cwd: Path | None = None, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """`claude ARGS`; with `ok`, an exit code other than 0 fails the test with the client's output."""
        env = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(self.home), **QUIET}
        env["CLAUDE_CONFIG_DIR"] = str(self.home / ".claude")
        done = subprocess.run(
            [self.binary, *args],
            cwd=cwd or self.home,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if ok and done.returncode:
            pytest.fail(f"claude {' '.join(map(str, args))} exited {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done


@pytest.fixture(scope="session")
def claude(tmp_path_factory: pytest.TempPathFactory) -> ClaudeClient:
    binary = install_claude()
    if binary is None:
        missing(f"Claude Code {VERSION}", "install node and npm, with a package registry in reach")
    return ClaudeClient(binary, tmp_path_factory.mktemp("claude-home"))
