"""Renders the templates the way a user does, from a folder without git: that is what an installed plugin is."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import copier
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of this test run, the same for all of xdist's workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "templates"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def made_once(folder):
    """True for the worker that is to fill the folder; the others wait for it."""
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = Path(f"{folder}.ready")
        yield not ready.exists()
        ready.touch()


@pytest.fixture(scope="session")
def installed(shared):
    """The parts of the repository that the command and the templates read, and nothing else."""
    folder = shared / "queuesmith"
    with made_once(folder) as due:
        if due:
            export(folder)
    return folder


def export(folder, *, proofs=True):
    built = shutil.ignore_patterns("__pycache__")
    parts = ["templates", "skills", "reference/studyhall/patterns", "queuesmith", "bin"]
    for part in [*parts, *(["tests/harness", "tests/reference"] if proofs else [])]:
        shutil.copytree(ROOT / part, folder / part, ignore=built, dirs_exist_ok=True)
    shared = [f"reference/studyhall/{name}.py" for name in ("api/impatient", "quick_imports")]
    for part in ("copier.yml", "pyproject.toml", *shared):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, folder / part)


@pytest.fixture(scope="session")
def rendered(installed, shared):
    """Every combination is rendered once; do not write into what this returns."""

    def once(name, **answers):
        if answers.get("kind") == "background-jobs":
            del answers["kind"]  # it is the default
        asked = json.dumps([name, answers], sort_keys=True)
        folder = shared / hashlib.sha256(asked.encode()).hexdigest()[:16]
        with made_once(folder) as due:
            if due:
                copier.run_copy(str(installed), folder / name, data=answers, defaults=True, quiet=True)
        return folder / name

    return once


@pytest.fixture
def render(rendered, tmp_path):
    """`render("my-service", kind="async-flow")` -> the new project, a copy of this test's own."""

    numbers = itertools.count()

    def make(name="my-service", **answers):
        made = rendered(name, **answers)
        return Path(shutil.copytree(made, tmp_path / f"render-{next(numbers)}" / name))

    return make


@pytest.fixture
def run():
    """Run a command in a project, with the tools of this environment; fails unless the exit code is as expected."""

    def go(*command, cwd, code=0, **options):
        # Without our own PYTHONPATH: a project must not find `studyhall` by accident.
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDIS_URL")}
        # The plugins that a project asks for: importing all of ours took half the time of its tests.
        plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_asyncio.plugin,pytest_timeout"}
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        env = {**clean, **plugins, "PATH": path, **options.pop("env", {})}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=options.pop("timeout", 280),
            stdin=subprocess.DEVNULL,
            **options,
        )
        assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return go
