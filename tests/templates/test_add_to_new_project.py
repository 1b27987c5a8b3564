"""A pattern that is added to a generated project keeps its `make lint test` green."""

import sys
from pathlib import Path

import pytest

from queuesmith import catalogue

VENV = Path(sys.executable).parents[1]
PARTS = [f"{each.id}.{Path(part).stem}" for each in catalogue.patterns().values() for part in each.parts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "patterns"),
    [
        ("background-jobs", ["lease", "tracing", "sync-inbox"]),
        pytest.param("background-jobs", [*catalogue.patterns(), *PARTS], marks=pytest.mark.full, id="all"),
        pytest.param("event-driven", [*catalogue.patterns(), *PARTS], marks=pytest.mark.full, id="all-events"),
    ],
)
def test_a_new_project_stays_green(render, run, installed, kind, patterns):
    project = render(kind=kind, package="a_package_with_rather_a_long_name")
    run(sys.executable, installed / "bin" / "queuesmith", "add", *patterns, cwd=project)
    run("make", f"VENV={VENV}", "lint", cwd=project)
    test = ("make", f"VENV={VENV}", "test", "ARGS=-q tests/patterns tests/test_settings.py")
    out = run(*test, cwd=project, timeout=800).stdout
    assert " passed" in out
    assert "skipped" not in out
