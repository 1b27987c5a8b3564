"""Which patterns there are, which modules each one needs, and which packages those import."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MODULES",
    "ROOT",
    "Pattern",
    "UnknownPattern",
    "closure",
    "find",
    "imports",
    "packages",
    "patterns",
    "version",
]

# In a wheel the parts of the repository that are copied from lie beside this file; in a checkout it is the checkout.
_SHIPPED = Path(__file__).resolve().parent / "shipped"
ROOT = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).resolve().parents[1]
MODULES = ROOT / "reference" / "studyhall" / "patterns"

# The one place that says which package an import comes from, where the names differ.
_PACKAGE_OF = {
    "aio_pika": "aio-pika",
    "confluent_kafka": "confluent-kafka",
    "croniter": "bullmq",  # bullmq fixes its version, and those of the next one
    "msgpack": "bullmq",
    "hiredis": "redis",
    "nacl": "pynacl",
    "nats": "nats-py",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "zoneinfo": "tzdata",  # of the standard library, but slim images have no time zones
}
_BROUGHT_ALONG = {"sqlalchemy": "aiosqlite"}  # the driver that `store` picks by name
_ON_REQUEST = {"psycopg"}  # imported only for a PostgreSQL address


class UnknownPattern(Exception):
    """No such pattern in the catalogue; the message suggests what may be meant."""


@dataclass(frozen=True, slots=True)
class Pattern:
    id: str
    skill: str
    title: str
    summary: str
    own: tuple[str, ...]  # its module and those that belong to it
    proofs: tuple[str, ...]  # test files, relative to the root

    @property
    def modules(self) -> list[str]:
        """Everything to copy: its own modules and all they import, also indirectly."""
        return closure(self.own)


@functools.cache
def patterns() -> dict[str, Pattern]:
    rows = tomllib.loads((ROOT / "reference" / "catalogue.toml").read_text(encoding="utf-8"))["pattern"]
    found = {}
    for row in rows:
        own = (row["module"], *row.get("also", []))
        proofs = tuple(sorted({proof.split("::")[0] for proof in row["proofs"]}))
        found[row["id"]] = Pattern(row["id"], row["skill"], row["title"], row["summary"], own, proofs)
    return found


def find(ident: str) -> Pattern:
    """By id (`dead-letter`) or by the name of its module (`dead_letter`, `dead_letter/sweeper.py`)."""
    known = patterns()
    wanted = ident.removesuffix(".py").replace("_", "-").lower()
    if wanted in known:
        return known[wanted]
    for pattern in known.values():
        if f"{wanted.replace('-', '_')}.py" == pattern.own[0]:
            return pattern
    raise UnknownPattern(
        f"there is no pattern {ident!r}{_suggestion(wanted)}; `queuesmith list` shows them all"
    )


def _suggestion(wanted: str) -> str:
    import difflib  # only on the way out

    names = {*patterns(), *(word for ident in patterns() for word in ident.split("-"))}
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    meant = [ident for ident in patterns() if near and near[0] in (ident, *ident.split("-"))]
    return f", did you mean {' or '.join(sorted(meant)[:3])}?" if meant else ""


def closure(modules: Iterable[str]) -> list[str]:
    """These modules and every sibling they import, also indirectly; sorted, `__init__.py` first."""
    found: set[str] = {"__init__.py"}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [f"{sibling}.py" for sibling in imports(name)[0]]
    return sorted(found)


@functools.cache
def imports(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """(sibling modules, top-level names of everything else)"""
    siblings: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse((MODULES / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            siblings |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            others.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return frozenset(siblings), frozenset(others)


def packages(modules: Iterable[str], *, postgres: bool = False, also: Iterable[str] = ()) -> list[str]:
    """Requirements, with the versions they were proven with, of these modules; `also` names further packages."""
    imported = set().union(*(imports(module)[1] for module in modules))
    names = {
        _PACKAGE_OF.get(name, name)
        for name in imported
        if name in _PACKAGE_OF or name not in sys.stdlib_module_names
    }
    names -= _ON_REQUEST
    names |= {driver for name, driver in _BROUGHT_ALONG.items() if name in names}
    names |= {"psycopg"} if postgres else set()
    known = _pinned()
    return sorted(known.get(name, name) for name in {*names, *also})


@functools.cache
def _pinned() -> dict[str, str]:
    """Package -> requirement, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    return {re.split(r"[\[<>=~! ]", item)[0].lower(): item for item in reversed(listed)}


def version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])
