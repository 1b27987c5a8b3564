"""The tests of a pattern that run in another project: with its package instead of ours, in its tests folder.

Tests that need the reference app, other patterns, other servers or minutes stay upstream; `queuesmith prove`
shows whether a service as a whole survives its faults.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from . import catalogue
from .catalogue import ROOT, Pattern

TESTS = ("tests/reference/portable", "tests/reference/unit")
HARNESS = "tests/harness"
PORTABLE = {"missing", "ports", "processes", "redis", "waiting"}  # harness modules that may be copied
# Package names of another length change line lengths: the project's own rules do not apply.
HEADER = "# Copied by queuesmith, which can update it.\n# ruff: noqa\n# fmt: off\n# mypy: ignore-errors\n"


@dataclass(slots=True)
class Proofs:
    """`files`: path in our repository -> path below the folder for proofs."""

    files: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)  # core modules that only the tests import


def proofs_of(patterns: Iterable[Pattern], present: set[str]) -> Proofs:
    """Every test of these patterns that can run elsewhere; `present` are modules copied anyway."""
    result = Proofs()
    for proof in sorted({path for pattern in patterns for path in _candidates(pattern)}):
        parts = _parts(proof)
        if parts is None:
            continue
        extra = set(catalogue.closure(parts[1])) - present
        if all(name.startswith("core/") for name in extra):
            result.files |= parts[0]
            result.modules |= extra
    return result


def _candidates(pattern: Pattern) -> Iterator[str]:
    """The portable test, else the unit tests; for a part, its own test as well."""
    for ident in dict.fromkeys((pattern.id.partition(".")[0], pattern.id)):
        name = f"test_{re.sub('[-.]', '_', ident)}.py"
        yield from [f"{folder}/{name}" for folder in TESTS if (ROOT / folder / name).is_file()][:1]


@functools.cache
def _parts(proof: str) -> tuple[dict[str, str], frozenset[str]] | None:
    """The files that this test is made of and where they go, and the modules it imports; None: it stays here."""
    files = {proof: PurePosixPath(proof).name}
    modules: set[str] = set()
    waiting = [proof]
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text(encoding="utf-8")
        if "parents[" in text and path == proof:
            return None  # reads other files of the repository
        for name in [*_imported(text, path), *_fixtures_in(text)]:
            top, *rest = name.split(".")
            if top == "studyhall":
                if rest[:1] != ["patterns"]:
                    return None
                modules.add(_module(rest[1:]))
            elif top == "harness":
                if rest[0] not in PORTABLE:
                    return None
                origin = f"{HARNESS}/{rest[0]}.py"
                if origin not in files:
                    files[origin] = f"proof_harness/{rest[0]}.py"
                    waiting.append(origin)
    return files, frozenset(modules)


def _module(dotted: list[str]) -> str:
    """The module that `studyhall.patterns.outbox.relay.Relay` is in: the longest prefix that is one."""
    for length in range(len(dotted), 0, -1):
        if result := catalogue.module_of(dotted[:length]):
            return result
    return "__init__.py"


def _imported(text: str, path: str) -> Iterator[str]:
    """Dotted names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level and path.startswith(HARNESS):
            yield f"harness.{node.module}"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _fixtures_in(text: str) -> Iterator[str]:
    """The harness modules whose fixtures this file asks for and does not define itself."""
    tree = ast.parse(text)
    own = {getattr(node, "name", "") for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)} - own
            yield from (f"harness.{_fixtures()[name]}" for name in names if name in _fixtures())


@functools.cache
def _fixtures() -> dict[str, str]:
    """Fixture -> harness module, without those that the conftest below replaces."""
    result = {}
    for path in sorted((ROOT / HARNESS).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
            if path.stem != "figures" and any("fixture" in mark for mark in marks):
                result[str(getattr(node, "name", ""))] = path.stem
    return result


def adapted(text: str, package: str) -> str:
    """A file of ours as it reads in a project whose modules are in `package`."""
    text = re.sub(r"\bstudyhall\.patterns\b", package, text)
    text = re.sub(r"^(\s*)(from|import) harness\b", r"\1\2 proof_harness", text, flags=re.MULTILINE)
    return text.replace('[str(ROOT / "reference"), str(ROOT / "tests"),', "[*sys.path,")


def conftest(source: str) -> str:
    """Fixtures and markers for the copied tests; `source` is the folder to import from, seen from tests/patterns."""
    return f'''"""What the copied tests need. A server, if any, is their own: on a free port, ended afterwards."""

import importlib
import inspect
import os
import random
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for path in (HERE, (HERE / "{source}").resolve()):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
# The same for the programs that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))

# As this folder's own fixtures: yours of the same name stay yours, and do not reach the tests here.
for module in sorted((HERE / "proof_harness").glob("*.py")):
    for name, value in vars(importlib.import_module(f"proof_harness.{{module.stem}}")).items():
        if type(value).__name__ == "FixtureFunctionDefinition":
            globals()[name] = value


@pytest.fixture
def figures():
    """Upstream it keeps what a test measured."""
    return lambda *args, **numbers: None


@pytest.fixture(scope="session")
def scale():
    return lambda quick, full: full if os.environ.get("QUEUESMITH_FULL") == "1" else quick


@pytest.fixture
def seed():
    return int(os.environ.get("QUEUESMITH_SEED") or random.SystemRandom().randrange(2**31))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: over 5 s")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj):
    """Coroutines are tests, whatever asyncio_mode the project has."""
    if inspect.iscoroutinefunction(obj):
        pytest.mark.asyncio(obj)
'''
