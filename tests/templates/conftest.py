"""Renders the templates the way a user does, from a folder without git: that is what an installed plugin is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import copier
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
Render = Callable[..., Path]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of the repository that the command and the templates read, and nothing else."""
    folder = tmp_path_factory.mktemp("plugin") / "queuesmith"
    export(folder)
    return folder


def export(folder: Path) -> None:
    built = shutil.ignore_patterns("__pycache__")
    for part in (
        "templates",
        "skills",
        "reference/studyhall/patterns",
        "queuesmith",
        "bin",
        "tests/harness",
        "tests/reference",
    ):
        shutil.copytree(ROOT / part, folder / part, ignore=built, dirs_exist_ok=True)
    for part in ("copier.yml", "pyproject.toml"):
        shutil.copy(ROOT / part, folder / part)


@pytest.fixture
def render(installed: Path, tmp_path: Path) -> Render:
    """`render("my-service", kind="async-flow")` -> the new project."""

    def make(name: str = "my-service", **answers: Any) -> Path:
        folder = tmp_path / name
        copier.run_copy(str(installed), folder, data=answers, defaults=True, quiet=True)
        return folder

    return make


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a project, with the tools of this environment; fails unless the exit code is as expected."""

    def go(*command: object, cwd: Path, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        # Without our own PYTHONPATH: a project must not find `studyhall` by accident.
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDIS_URL")}
        env = {**clean, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **options.pop("env", {})}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
            stdin=subprocess.DEVNULL,
            **options,
        )
        assert done.returncode == code, (
            f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return go
