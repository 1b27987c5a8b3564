"""The code in the pages runs: against real Redis, with nothing but the modules that the skill itself brings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.figures import full

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(__file__).parent / "examples"
SKILLS = ("async-flow", "background-jobs", "event-driven")


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A project that has only what the folder of the skill gives: `patterns/` and the example files."""
    skill = request.param
    shutil.copytree(ROOT / "skills" / skill / "modules", tmp_path / "patterns")
    for example in (EXAMPLES / skill).glob("*.py"):
        shutil.copy(example, tmp_path / example.name.replace("kill9", "test_kill9"))
    return tmp_path


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDIS_URL")}


@pytest.mark.parametrize("project", SKILLS, indirect=True, ids=SKILLS)
def test_examples_of_the_pages_do_what_they_say(project: Path, redis_url: str) -> None:
    names = sorted(path.stem for path in project.glob("*.py") if "async def example(" in path.read_text())
    done = subprocess.run(
        [sys.executable, EXAMPLES / "run_examples.py", redis_url, project, *names],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("ok: ")] == [
        f"ok: {name}" for name in names
    ]


@pytest.mark.fault
@pytest.mark.parametrize(
    "project", ["background-jobs", "event-driven"], indirect=True, ids=["jobs", "events"]
)
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
@pytest.mark.parametrize("project", ["background-jobs"], indirect=True, ids=["jobs"])
def test_kill_9_test_notices_an_effect_outside_the_transaction(project: Path) -> None:
    """The naive twin: the same handler with its effect beside the marker's transaction. The copied test must fail."""
    jobs = project / "jobs.py"
    text = jobs.read_text()
    assert 'return Done({"added": payload.cents}, save)' in text
    naive = (
        "    from patterns.store import begin\n    import asyncio\n\n    async with begin(ctx.store) as tx:\n"
    )
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
    assert "assert 2" in done.stdout, "doubled effects: more than the number of jobs"
