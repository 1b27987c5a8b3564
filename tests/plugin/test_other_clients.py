"""Other clients take the plugin as the README says: the real ones, without a login, in a home of their own.

Codex and Copilot read Claude Code's marketplace. Cursor, which has no tool to run here, reads plugin.json, and its own
for the agents: skillsaw knows that format (test_skill_pages.py). 700 MB of packages, so in `make full` alone.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.missing import missing
from harness.node import install

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
SKILLS = sorted(path.parent.name for path in ROOT.glob("skills/*/SKILL.md"))
LINES = re.findall(r"^(?:npx skills|gemini|codex|copilot) .+$", (ROOT / "README.md").read_text(), re.MULTILINE)
PACKAGES = {
    "skills": "1.7.4",
    "gemini": "@google/gemini-cli@0.61.0",
    "codex": "@openai/codex@0.169.0",
    "copilot": "@github/copilot@1.0.102",
}


def follow(client, tmp_path, *further):
    """The README's lines for this client, with a checkout in place of the address; their output."""
    package, _, version = PACKAGES[client].rpartition("@")
    home = install(f"client-{client}", {package or client: version})
    if home is None or int(subprocess.check_output(["node", "-p", "process.versions.node"]).split(b".")[0]) < 22:
        missing(f"Node.js 22 with {client}", "install a current node and npm, with a package registry in reach")
    checkout = tmp_path / "checkout"
    for name in ("skills", "agents", ".claude-plugin"):
        shutil.copytree(ROOT / name, checkout / name)
    for name in ("plugin.json", "gemini-extension.json"):
        shutil.copy(ROOT / name, checkout)
    lines = [line.removeprefix("npx ") for line in LINES if line.split()[line.startswith("npx")] == client]
    assert lines, "the README tells how"
    out = ""
    for line in (*lines, *further):
        command = re.sub(r"(?:https://github\.com/)?queuesmith/queuesmith\b", str(checkout), line)
        done = subprocess.run(
            [home / "node_modules" / ".bin" / client, *shlex.split(command)[1:]],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CI": "true", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,  # a busy machine took two minutes for eight seconds of work
            check=False,
        )
        out += done.stdout + done.stderr
        assert done.returncode == 0, f"{command}\n{out}"
    return out


def test_the_tool_for_skills_installs_them_all_from_a_checkout(tmp_path):
    follow("skills", tmp_path)
    folders = {path.parent.name: path.parent for path in tmp_path.glob(".agents/skills/*/SKILL.md")}
    assert sorted(folders) == SKILLS
    assert (folders["background-jobs"] / "references" / "recipes" / "paid-call.md").is_file(), "with its pages"


def test_gemini_accepts_the_extension_and_installs_the_skills(tmp_path):
    out = follow("gemini", tmp_path, "gemini extensions validate queuesmith/queuesmith")
    assert "successfully validated" in out
    assert set(re.findall(r"Successfully installed skill: ([\w-]+)", out)) == set(SKILLS)


@pytest.mark.parametrize("client", ["codex", "copilot"])
def test_a_client_that_reads_claude_marketplaces_installs_this_version(client, tmp_path):
    out = follow(client, tmp_path, f"{client} plugin list")
    version = re.escape(json.loads((ROOT / "plugin.json").read_text())["version"])
    assert re.search(rf"queuesmith@queuesmith.*\bv?{version}\b", out), out
