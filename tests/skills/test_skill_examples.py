"""The code in the pages runs: against real Redis, with only the patterns that its pages say to add."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from queuesmith import cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(__file__).parent / "examples"
COMMAND = re.compile(r'queuesmith"? add ([a-z. -]+?) --into')


def named(example):
    """The patterns that the skill, and the pages that quote this example, say to add."""
    skill = ROOT / "skills" / example.parent.name
    quoted = f"{example.relative_to(ROOT)}#"
    pages = [page for page in sorted(skill.glob("references/*.md")) if quoted in page.read_text()]
    texts = [(skill / "SKILL.md").read_text(), *(page.read_text() for page in pages)]
    return sorted({name for text in texts for names in COMMAND.findall(text) for name in names.split()})


@pytest.fixture
def project(request, tmp_path, capsys):
    """A folder with the example files, and `patterns/` as `queuesmith add` makes it."""
    example = request.param
    folder = tmp_path / "src"
    folder.mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert cli.main(["add", *named(example), "--into", str(folder), "--no-tests"]) == 0, capsys.readouterr()
    for file in example.parent.glob("*.py"):
        shutil.copy(file, folder / file.name)
    return folder


def label(example):
    return f"{example.parent.name}-{example.stem}"


RUNNABLE = [path for path in sorted(EXAMPLES.glob("*/*.py")) if "async def example(" in path.read_text()]


def environment():
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDIS_URL")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "name"), [(path, path.stem) for path in RUNNABLE], indirect=["project"], ids=map(label, RUNNABLE)
)
def test_example_does_what_its_page_says(project, name, redis_url):
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
