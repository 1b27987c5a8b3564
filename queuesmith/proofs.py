"""The proofs of a pattern, made to run in another project: its package instead of ours, its tests folder."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from . import catalogue
from .catalogue import ROOT, Pattern

__all__ = ["Proofs", "adapted", "conftest", "proofs_of"]

HARNESS = "tests/harness"
# What proofs may bring along. The other harness modules need servers or an app that the project does not have.
PORTABLE = {
    "__init__",
    "figures",
    "missing",
    "pipelines",
    "ports",
    "postgres",
    "processes",
    "redis",
    "waiting",
    "workers",
}
MOST_EXTRA = 4  # modules that only a proof needs; one that needs more stays upstream


@dataclass(slots=True)
class Proofs:
    """`files`: path in our repository -> path below the folder for proofs."""

    files: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)  # pattern modules they import
    left: dict[str, str] = field(default_factory=dict)  # proof -> why it stays upstream


def proofs_of(patterns: Iterable[Pattern], present: set[str]) -> Proofs:
    """Every proof of these patterns that can run elsewhere; `present` are the modules that are copied anyway."""
    found = Proofs()
    for proof in sorted({path for pattern in patterns for path in _candidates(pattern)}):
        try:
            files, modules = _parts(proof)
        except _Stays as reason:
            found.left[proof] = str(reason)
            continue
        extra = set(catalogue.closure(modules)) - present
        if len(extra) > MOST_EXTRA:
            found.left[proof] = f"needs {len(extra)} more modules"
            continue
        found.files |= files
        found.modules |= extra
    return found


def _candidates(pattern: Pattern) -> Iterator[str]:
    yield from pattern.proof_files
    unit = f"tests/reference/unit/test_{pattern.id.partition('.')[0].replace('-', '_')}.py"
    if (ROOT / unit).is_file():
        yield unit


class _Stays(Exception):
    pass


@functools.cache
def _parts(proof: str) -> tuple[dict[str, str], frozenset[str]]:
    files = {proof: PurePosixPath(proof).name}
    modules: set[str] = set()
    waiting = [proof]
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text(encoding="utf-8")
        if re.search(r"parents\[", text) and not path.startswith(HARNESS):
            raise _Stays("uses other files of the repository")
        for name in [*_imported(text, path), *_fixtures_in(text)]:
            top, *rest = name.split(".")
            if top == "studyhall":
                if rest[:1] != ["patterns"]:
                    raise _Stays("uses the reference app")
                modules |= {_module(rest[1:])}
                continue
            new = _file_of(top, rest, path)
            if new and new[0] not in files:
                files[new[0]] = new[1]
                waiting.append(new[0])
        for program in set(re.findall(r'"(\w+\.\w+)"', text)) if path == proof else ():
            source = str(PurePosixPath(proof).parent / "programs" / program)
            if (ROOT / source).is_file() and source not in files:
                if not program.endswith(".py"):
                    raise _Stays(f"runs {program}")
                files[source] = f"programs/{program}"
                waiting.append(source)
    return files, frozenset(modules)


def _module(dotted: list[str]) -> str:
    """The module that `studyhall.patterns.outbox.relay.Relay` is in: the longest beginning that is one."""
    for length in range(len(dotted), 0, -1):
        if found := catalogue.module_of(dotted[:length]):
            return found
    return "__init__.py"


def _imported(text: str, path: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            if not path.startswith(HARNESS):
                raise _Stays("shares code with its neighbours")
            yield from (
                [f"harness.{node.module}"] if node.module else [f"harness.{a.name}" for a in node.names]
            )
        elif isinstance(node, ast.ImportFrom) and re.match(
            r"(studyhall\.patterns|harness)\b", node.module or ""
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _fixtures_in(text: str) -> Iterator[str]:
    """The harness modules whose fixtures this file asks for."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
            yield from (f"harness.{_fixtures()[name]}" for name in names if name in _fixtures())


@functools.cache
def _fixtures() -> dict[str, str]:
    """Fixture -> harness module."""
    found = {}
    for path in sorted((ROOT / HARNESS).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
            if any(mark.startswith("pytest.fixture") for mark in marks):
                found[str(getattr(node, "name", ""))] = path.stem
    return found


def _file_of(top: str, rest: list[str], path: str) -> tuple[str, str] | None:
    """The file of ours that this import needs, and where it goes; None: Python's, or a package's."""
    if top == "harness":
        name = rest[0] if rest else "__init__"
        if name not in PORTABLE:
            raise _Stays(f"needs {name.replace('_', ' ')}")
        return f"{HARNESS}/{name}.py", f"proof_harness/{name}.py"
    if top not in sys.stdlib_module_names:
        sibling = PurePosixPath(path).parent / f"{top}.py"
        if (ROOT / sibling).is_file():
            return str(sibling), f"programs/{top}.py"
    return None


def adapted(text: str, package: str) -> str:
    """A proof, program or harness file as it reads in a project whose modules are in `package`."""
    text = re.sub(r"\bstudyhall\.patterns\b", package, text)
    text = re.sub(r"^(\s*)(from|import) harness\b", r"\1\2 proof_harness", text, flags=re.MULTILINE)
    return text.replace('[str(ROOT / "reference"), str(ROOT / "tests"),', "[*sys.path,")


def conftest(source: str) -> str:
    """Fixtures and markers for the copied proofs; `source` is the folder to import from, seen from tests/patterns."""
    return f'''"""Made by queuesmith: what the copied proofs need. They start real servers and kill real processes."""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for path in (HERE, (HERE / "{source}").resolve()):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
os.environ.setdefault("QUEUESMITH_SEED", str(random.SystemRandom().randrange(2**31)))
os.environ.setdefault("QUEUESMITH_FIGURES", str(Path(tempfile.gettempdir()) / "queuesmith-figures"))


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("fault: kills real processes", "full: long", "needs_postgres: needs a PostgreSQL server"):
        config.addinivalue_line("markers", marker)
    for module in sorted((HERE / "proof_harness").glob("[a-z]*.py")):
        config.pluginmanager.register(importlib.import_module(f"proof_harness.{{module.stem}}"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("QUEUESMITH_FULL") != "1":
        items[:] = [item for item in items if not item.get_closest_marker("full")]
'''
