"""What reference/README.md draws is what the code does: the list of steps, the files of the walks, the tables."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import ROOT

README = (ROOT / "reference" / "README.md").read_text()
WORKER = ROOT / "reference" / "studyhall" / "worker.py"


def steps_of(source):
    """The names of the steps that `Pipeline(…)` is given, in order."""
    [call] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Pipeline"
    ]
    given = [arg.value if isinstance(arg, ast.Starred) else arg for arg in call.args]
    return [ast.unparse(arg.func) for arg in given if isinstance(arg, ast.Call)]


def test_the_readme_draws_the_steps_of_the_worker_in_their_order():
    drawn = re.search(r"<!-- steps of worker.py -->\n(.*?)<!-- /steps -->", README, re.DOTALL)
    assert drawn
    assert re.findall(r"^\| \d+ \| `(\w+)`", drawn[1], re.MULTILINE) == steps_of(WORKER.read_text())


def test_every_file_on_the_walks_is_there_and_short_enough_to_follow():
    walks = re.findall(r"<!-- walk -->\n(.*?)<!-- /walk -->", README, re.DOTALL)
    assert len(walks) == 2
    for walk in walks:
        files = re.findall(r"^\d+\. \[`[^`]+`\]\(([^)]+)\)", walk, re.MULTILINE)
        assert 5 <= len(files) <= 15
        for name in files:
            assert (ROOT / "reference" / name).is_file(), name


DECLARED = """
import importlib, json, pkgutil, sys
{}
from studyhall.patterns.core.store import metadata
print(json.dumps(sorted(metadata.tables)))
"""
EVERYTHING = """
import studyhall
for module in pkgutil.walk_packages(studyhall.__path__, "studyhall."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def declared_by(code):
    done = subprocess.run(
        [sys.executable, "-c", DECLARED.format(code)], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_opening_the_database_makes_every_table_whoever_opens_it():
    """Not only imported ones: an order placed by a process without documents found no table."""
    listed = declared_by("from studyhall.database import TABLES\nassert len(TABLES) == 26, len(TABLES)")
    assert listed == declared_by(EVERYTHING)
    assert "open_store" not in Path(ROOT / "reference/studyhall/app.py").read_text(), "one place opens it"
