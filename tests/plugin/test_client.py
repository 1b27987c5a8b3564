"""The plugin in the real Claude Code client: offline, with no login, in a home of its own."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs_node

ROOT = Path(__file__).resolve().parents[2]
SKILLS = sorted(path.parent.name for path in ROOT.glob("skills/*/SKILL.md"))
AGENTS = sorted(path.stem for path in ROOT.glob("agents/*.md"))
NOT_SHIPPED = {".git", ".venv", "build", "dist", "site", "node_modules", "__pycache__", ".studyhall"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [("--strict", "."), ("--strict", ".claude-plugin/plugin.json"), ("--strict", "--profile", "directory", ".")],
    ids=["repository", "manifest", "directory"],
)
def test_strict_validation_finds_nothing(claude, repository, args):
    done = claude.run("plugin", "validate", *args[:-1], repository / args[-1])
    assert "Validation passed" in done.stdout
    assert "warning" not in done.stdout.lower()


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """What a user's clone contains: the files git knows (in an unpacked archive: all), committed."""
    copy = tmp_path_factory.mktemp("repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()] or [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*")
        if path.is_file() and not NOT_SHIPPED & set(path.relative_to(ROOT).parts)
    ]
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q", "-b", "main"], ["add", "-A", "-f"], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", *who, *command], cwd=copy, check=True, capture_output=True)
    return copy


@pytest.fixture(scope="session")
def installed(claude, repository):
    """Installed by the very commands of the README; git is told that GitHub is a folder here."""
    slug = json.loads((ROOT / "plugin.json").read_text())["repository"].removeprefix("https://github.com/")
    (claude.home / ".gitconfig").write_text(
        f'[url "file://{repository}"]\n\tinsteadOf = https://github.com/{slug}.git\n'
        '[protocol "file"]\n\tallow = always\n[safe]\n\tdirectory = *\n'
    )
    commands = re.findall(r"^/plugin (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2, "the README names the two commands"
    for command in commands:
        claude.run("plugin", *command.split())
    (claude.home / "work").mkdir()
    return claude


def test_readme_commands_install_this_version(installed):
    (plugin,) = json.loads(installed.run("plugin", "list", "--json").stdout)
    assert plugin["id"] == "queuesmith@queuesmith"
    assert plugin["version"] == json.loads((ROOT / "plugin.json").read_text())["version"]
    assert plugin["enabled"]


def test_session_offers_exactly_our_skills_and_agents(installed):
    asked = ("-p", "--output-format", "stream-json", "--verbose", "hi")
    out = installed.run(*asked, cwd=installed.home / "work", ok=False).stdout  # ends with "not logged in"
    first = json.loads(out.splitlines()[0])
    assert first["subtype"] == "init"
    ours = [name.removeprefix("queuesmith:") for name in first["skills"] if name.startswith("queuesmith:")]
    assert sorted(ours) == SKILLS
    agents = [name.removeprefix("queuesmith:") for name in first["agents"] if name.startswith("queuesmith:")]
    assert sorted(agents) == AGENTS
    assert not first.get("plugin_errors")


@pytest.mark.parametrize("arguments", ["", "src/app with $1 and 'quotes'"], ids=["plain", "arguments"])
@pytest.mark.parametrize("skill", SKILLS)
def test_skill_expands_with_nothing_left_open(installed, skill, arguments, tmp_path):
    installed.run("-p", f"/queuesmith:{skill} {arguments}".rstrip(), cwd=tmp_path, ok=False)
    text = expanded(installed.home, tmp_path)
    body = re.sub(r"\A---\n.*?\n---\n", "", (ROOT / "skills" / skill / "SKILL.md").read_text(), flags=re.DOTALL)
    last_line = body.strip().splitlines()[-1]
    assert last_line in text, "the whole skill is there"
    without_arguments = text.replace(arguments, "") if arguments else text
    assert not re.findall(r"\$\{?(?:CLAUDE_\w+|ARGUMENTS|\d)\}?", without_arguments), "a variable was not replaced"
    for path in re.findall(r"(/\S+/(?:bin/queuesmith|scripts/\w+\.py))", text):
        assert Path(path).is_file(), path


def expanded(home, project):
    """The skill as the client expanded it into the transcript of the session in `project`."""
    folder = home / ".claude" / "projects" / re.sub(r"[^A-Za-z0-9]", "-", str(project.resolve()))
    (transcript,) = folder.glob("*.jsonl")
    entries = [json.loads(line) for line in transcript.read_text().splitlines()]
    notes = [entry["message"]["content"] for entry in entries if entry.get("isMeta") and entry.get("type") == "user"]
    texts = [part["text"] for note in notes if isinstance(note, list) for part in note if part.get("type") == "text"]
    return next(text for text in texts if text.startswith("Base directory for this skill"))


def test_every_eval_case_loads(claude, tmp_path):
    """Without a login no case can run. A client that asks for one and complains of no file has read them all."""
    plugin = tmp_path / "plugin"
    shutil.copytree(ROOT / "tests" / "evals", plugin / "tests" / "evals")
    shutil.copytree(ROOT / ".claude-plugin", plugin / ".claude-plugin")
    out, result = evaluate(claude, plugin, tmp_path)
    assert result["partialReason"] == "auth_failed"
    assert "failed to load" not in out
    assert "cannot pass" not in out
    case = plugin / "tests" / "evals" / "slash-command" / "case.yaml"
    case.write_text(case.read_text().replace("type: regex", "type: no-such-grader", 1))
    out, _ = evaluate(claude, plugin, tmp_path)
    assert "1 case file(s) failed to load" in out, "this test would notice a broken case"


def evaluate(claude, plugin, folder):
    report = folder / "result.json"
    where = ("--eval-dir", "tests/evals", "--json", str(report), "--output-dir", str(folder / "out"))
    how = ("--no-publish", "--trust-plugin", "--runs", "1", "--ablation", "none", "--allow-tools", "Write", "Edit")
    done = claude.run("plugin", "eval", plugin, *where, *how, ok=False)
    assert done.returncode == 2, done.stderr
    result = json.loads(report.read_text())
    return done.stdout + done.stderr, result
