"""The quickstart of the guide's home, as it is typed, but with the packages of these tests."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import ROOT

HOME = (ROOT / "guide" / "pages" / "index.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", HOME, re.DOTALL | re.MULTILINE)
ROWS = re.compile(r"^(\d+) (\d+)$", re.MULTILINE)


def start(folder):
    command = [sys.executable, ROOT / "bin" / "queuesmith", "start", "resumable-import"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_quickstart_installs_what_the_recipe_needs(tmp_path):
    asked = re.search(r"pip install (.*)", start(tmp_path))
    typed = re.search(r"uv pip install -q (.*)", BLOCKS[0])
    assert asked
    assert typed
    names = [{re.split(r"[\[<>=]", word.strip("'"))[0] for word in line[1].split()} for line in (asked, typed)]
    assert names[0] - {"pytest", "pytest-asyncio"} == names[1]


@pytest.mark.slow
def test_the_quickstart_ends_with_every_row_once_after_its_kill(tmp_path):
    start(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = shell.communicate("\n".join(BLOCKS[1:]), timeout=180)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    seen = [(int(rows), int(distinct)) for rows, distinct in ROWS.findall(out)]
    assert seen, errors
    assert 0 < seen[0][0] < 20_000, "the kill hit a running import"
    assert all(rows == distinct for rows, distinct in seen)
    assert seen[-1] == (20_000, 20_000)
