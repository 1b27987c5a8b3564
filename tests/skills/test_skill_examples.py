"""The code in the pages runs: against real Redis, with nothing but the patterns that its pages tell to add."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.figures import full
from queuesmith import cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(__file__).parent / "examples"
COMMAND = re.compile(r'queuesmith"? add ([a-z. -]+?) --into')


def named(example: Path) -> list[str]:
    """The patterns that the skill, and the pages that quote this example, tell the reader to add."""
    skill = ROOT / "skills" / example.parent.name
    quoted = f"{example.relative_to(ROOT)}#"
    pages = [page for page in sorted(skill.glob("references/*.md")) if quoted in page.read_text()]
    texts = [(skill / "SKILL.md").read_text(), *(page.read_text() for page in pages)]
    return sorted({name for text in texts for names in COMMAND.findall(text) for name in names.split()})


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the example files, and `patterns/` as `queuesmith add` makes it."""
    example: Path = request.param
    folder = tmp_path / "src"
    folder.mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert cli.main(["add", *named(example), "--into", str(folder), "--no-tests"]) == 0, capsys.readouterr()
    for one in example.parent.glob("*.py"):
        shutil.copy(one, folder / one.name.replace("kill9", "test_kill9"))
    return folder


def label(example: Path) -> str:
    return f"{example.parent.name}-{example.stem}"


RUNNABLE = [path for path in sorted(EXAMPLES.glob("*/*.py")) if "async def example(" in path.read_text()]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDIS_URL")}


@pytest.mark.parametrize(
    ("project", "name"),
    [(path, path.stem) for path in RUNNABLE],
    indirect=["project"],
    ids=map(label, RUNNABLE),
)
def test_example_does_what_its_page_says(project: Path, name: str, redis_url: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "run_example.py", redis_url, project, name],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


KILLS = [EXAMPLES / skill / "kill9.py" for skill in ("background-jobs", "event-driven")]


@pytest.mark.fault
@pytest.mark.parametrize("project", KILLS, indirect=True, ids=["jobs", "events"])
def test_kill_9_test_that_readers_copy_passes(project: Path) -> None:
    """It asserts itself that its kills came while work was left."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:valkey", "-p", "no:cacheprovider", "test_kill9.py"],
        cwd=project,
        env={**environment(), "KILLS": "3" if full() else "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.fault
@pytest.mark.full
@pytest.mark.parametrize("project", KILLS[:1], indirect=True, ids=["jobs"])
def test_kill_9_test_notices_an_effect_outside_the_transaction(project: Path) -> None:
    """The naive twin: the same handler with its effect beside the marker's transaction. The copied test must fail."""
    jobs = project / "jobs.py"
    text = jobs.read_text()
    assert 'return Done({"added": payload.cents}, save)' in text
    naive = "    from patterns.core.store import begin\n    import asyncio\n\n    async with begin(ctx.store) as tx:\n"
    naive += (
        "        await save(tx)\n    await asyncio.sleep(0.05)\n    return Done({'added': payload.cents})"
    )
    jobs.write_text(text.replace('    return Done({"added": payload.cents}, save)', naive))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:valkey", "-p", "no:cacheprovider", "test_kill9.py"],
        cwd=project,
        env={**environment(), "KILLS": "2"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "assert 2" in done.stdout, "duplicated effects: more than the number of jobs"
