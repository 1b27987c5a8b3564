"""Which patterns there are, which modules each one needs, and which packages those import.

The entry of a pattern is the front matter of its page, `skills/SKILL/references/ID.md`:

    title            what it is called; what it promises is the paragraph **Promise.** of the page
    modules          in reference/studyhall/patterns, the one with the promise first; `outbox/`: the whole package
    parts            modules copied only when asked for: `queuesmith add event-bus.nats`
    proofs           test file below tests/reference -> names of tests

Its figures, if a proof writes any, are in reference/figures/ID.json.
"""

import ast
import dataclasses
import functools
import json
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

# A wheel ships what is copied in a folder beside this file; without it, this is a checkout.
_SHIPPED = Path(__file__).resolve().parent / "shipped"
ROOT = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).resolve().parents[1]
MODULES = ROOT / "reference" / "studyhall" / "patterns"
SKILLS = {"background-jobs": "Background jobs", "event-driven": "Event-driven", "async-flow": "Async flow"}

# The one place that says which package an import comes from, where the names differ or one is not enough.
_PACKAGES_OF = {
    "aio_pika": ("aio-pika",),
    "confluent_kafka": ("confluent-kafka",),
    "croniter": ("bullmq", "croniter"),  # bullmq pins this version, and msgpack's
    "msgpack": ("bullmq", "msgpack"),
    "hiredis": ("redis",),
    "nacl": ("pynacl",),
    "nats": ("nats-py",),
    "opentelemetry": ("opentelemetry-api",),
    "prometheus_client": ("prometheus-client",),
    "pydantic_core": ("pydantic",),
    "pytest": ("pytest", "pytest-asyncio"),
    "pytest_asyncio": ("pytest", "pytest-asyncio"),
    "sqlalchemy": ("sqlalchemy", "aiosqlite"),  # the driver that `store` picks by name
    "zoneinfo": ("tzdata",),  # of the standard library, but slim images have no time zones
}
_ON_REQUEST = {"psycopg"}  # imported only for a PostgreSQL address


class UnknownPattern(Exception):
    """No such pattern in the catalogue; the message suggests what may be meant."""


class WrongFrontMatter(Exception):
    """The entry of a pattern cannot be read; the message names the page and what is missing."""


@dataclass(frozen=True, slots=True)
class Pattern:
    id: str
    skill: str
    title: str
    summary: str
    own: tuple[str, ...]  # its modules, the one with the promise first
    parts: tuple[str, ...]  # modules copied only when asked for
    proofs: tuple[str, ...]  # tests/x.py::test_y
    page: Path

    @property
    def modules(self) -> list[str]:
        """Everything to copy: its own modules and all they import, even indirectly."""
        return closure(self.own)

    def needed_for(self, part: str) -> list[str]:
        """The packages that this part and its imports need beyond those of the pattern."""
        has = packages(self.modules)
        return [name for name in packages(closure([part])) if name not in has]

    @property
    def proof_files(self) -> list[str]:
        return sorted({proof.split("::")[0] for proof in self.proofs})

    @property
    def figures(self) -> str:
        """The file in reference/figures that its proofs write, if they measure something."""
        return f"{self.id}.json"


@functools.cache
def patterns() -> dict[str, Pattern]:
    """By id. A page without front matter is reading, not a pattern."""
    entries = {}
    for skill in SKILLS:
        for page in sorted((ROOT / "skills" / skill / "references").glob("*.md")):
            if entry := front_matter(page):
                entries[page.stem] = _pattern(page, skill, entry)
    return entries


def _pattern(page: Path, skill: str, entry: dict[str, Any]) -> Pattern:
    known = {"title", "modules", "parts", "proofs"}
    if unknown := set(entry) - known:
        raise WrongFrontMatter(f"{page}: unknown {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    if missing := {"title", "modules", "proofs"} - set(entry):
        raise WrongFrontMatter(f"{page}: its front matter lacks {', '.join(sorted(missing))}")
    promise = _PROMISE.search(page.read_text(encoding="utf-8"))
    if promise is None:
        raise WrongFrontMatter(f"{page}: it has no paragraph `**Promise.** …`")
    parts = tuple(entry.get("parts", ()))
    own: dict[str, None] = {}  # an ordered set
    for name in entry["modules"]:
        inside = sorted((MODULES / name).glob("*.py")) if name.endswith("/") else [MODULES / name]
        own |= dict.fromkeys(path.relative_to(MODULES).as_posix() for path in inside)
    plain = tuple(name for name in own if name not in parts and not name.endswith("__init__.py"))
    proofs = tuple(f"tests/reference/{file}::{name}" for file, names in entry["proofs"].items() for name in names)
    return Pattern(page.stem, skill, entry["title"], promise[1], plain, parts, proofs, page)


# ---- front matter: as much YAML as an entry needs, so that the command needs only Python

_PROMISE = re.compile(r"^\*\*Promise\.\*\* (.+)$", re.MULTILINE)
_FRONT = re.compile(r"\A---\n(.*?\n)---\n+", re.DOTALL)


def without_front_matter(text: str) -> str:
    return _FRONT.sub("", text)


def front_matter(page: Path) -> dict[str, Any]:
    """`key: text`, `key: [a, b]`, and `key:` above indented `file:` and `- name` lines."""
    entry: dict[str, Any] = {}
    block: dict[str, list[str]] = {}
    match = _FRONT.match(page.read_text(encoding="utf-8"))
    for number, line in enumerate(match[1].splitlines() if match else (), 2):
        key, colon, value = line.partition(":")
        value = value.strip()
        if line.startswith("    - ") and block:
            block[next(reversed(block))].append(line[6:].strip())
        elif line.startswith("  ") and not line.startswith("   ") and line.endswith(":"):
            block[line.strip()[:-1]] = []
        elif not re.fullmatch(r"[a-z]+", key) or not colon:
            raise WrongFrontMatter(f"{page}:{number}: neither `key: value` nor part of a list: {line!r}")
        elif not value:
            block = entry[key] = {}
        elif value.startswith("["):
            entry[key] = [item.strip() for item in value.strip("[]").split(",") if item.strip()]
        else:
            entry[key] = json.loads(value) if value.startswith('"') else value
    return entry


# ---- lookup


def find(ident: str) -> Pattern:
    """By id (`dead-letter`), with a part (`event-bus.nats`), or by its module (`dead_letter/sweeper.py`)."""
    known = patterns()
    wanted = ident.removesuffix(".py").replace("_", "-").lower()
    if wanted in known:
        return known[wanted]
    plain, _, part = wanted.partition(".")
    for pattern in known.values():
        if plain == pattern.id and part:
            return _with_part(pattern, part)
        if f"{wanted.replace('-', '_')}.py" == pattern.own[0]:
            return pattern
    raise UnknownPattern(f"there is no pattern {ident!r}{_suggestion(wanted)}; `queuesmith list` shows them all")


def _with_part(pattern: Pattern, part: str) -> Pattern:
    for module in pattern.parts:
        name = PurePosixPath(module).stem
        if name.replace("_", "-") == part:
            return dataclasses.replace(pattern, id=f"{pattern.id}.{name}", own=(*pattern.own, module))
    names = ", ".join(f"{pattern.id}.{PurePosixPath(module).stem}" for module in pattern.parts)
    raise UnknownPattern(f"{pattern.id} has no part {part!r}; it has {names or 'none'}")


def _suggestion(wanted: str) -> str:
    import difflib  # only when refusing

    names = {*patterns(), *(word for ident in patterns() for word in ident.split("-"))}
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    meant = [ident for ident in patterns() if near and near[0] in (ident, *ident.split("-"))]
    return f", did you mean {' or '.join(sorted(meant)[:3])}?" if meant else ""


# ---- what imports what


def closure(modules: Iterable[str]) -> list[str]:
    """These modules and all they import, even indirectly, with the `__init__.py` of their packages; sorted."""
    reached: set[str] = {"__init__.py"}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imports(name)[0]
    return sorted(reached)


@functools.cache
def imports(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """(our modules that it loads, top-level names of everything else)"""
    package = PurePosixPath(module).parent.parts
    ours = {"/".join((*package[:depth], "__init__.py")) for depth in range(len(package) + 1)}
    others: set[str] = set()
    for node in ast.walk(ast.parse((MODULES / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - (node.level - 1)]
            base = (*above, *(node.module or "").split(".")) if node.module else above
            for alias in node.names:
                ours.add(module_of((*base, alias.name)) or module_of(base) or "/".join(base))
            ours |= {module_of(base) or "/".join(base)} if base else set()
        elif isinstance(node, ast.ImportFrom):
            others.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return frozenset(ours - {module}), frozenset(others)


def module_of(dotted: Iterable[str]) -> str | None:
    """`("outbox", "relay")` -> `outbox/relay.py`, `("outbox",)` -> `outbox/__init__.py`; None: there is none."""
    path = "/".join(dotted)
    names = (f"{path}.py", f"{path}/__init__.py") if path else ("__init__.py",)
    return next((name for name in names if (MODULES / name).is_file()), None)


def public(module: str) -> tuple[str, str]:
    """Its name below the patterns, and what it offers: (`retry`, `decide, full_jitter`).

    Those of its package, if that offers the same names.
    """
    path = PurePosixPath(module)
    names = _all(module)
    package = (path.parent / "__init__.py").as_posix()
    if path.parent.name and set(names) & set(_all(package)):
        return ".".join(path.parent.parts), ", ".join(_all(package))
    return ".".join(path.with_suffix("").parts), ", ".join(names)


def _all(module: str) -> list[str]:
    for node in ast.parse((MODULES / module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def packages(
    modules: Iterable[str], *, imported: Iterable[str] = (), postgres: bool = False, also: Iterable[str] = ()
) -> list[str]:
    """Requirements of these modules and of what else is `imported`, in the versions they were proven with.

    `postgres`: also what only a PostgreSQL address needs. `also` names further packages.
    """
    needed = set(imported).union(*(imports(module)[1] for module in modules))
    names: set[str] = set()
    for name in needed:
        if name in _PACKAGES_OF or name not in sys.stdlib_module_names:
            names |= set(_PACKAGES_OF.get(name, (name,)))
    if not postgres:
        names -= _ON_REQUEST
    known = pinned()
    return sorted(known.get(name, name) for name in {*names, *also})


def imported(text: str) -> set[str]:
    """The top-level names that this program imports anywhere."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots.add((node.module or "").split(".")[0])
    return roots


@functools.cache
def pinned() -> dict[str, str]:
    """Package -> requirement, from pyproject.toml."""
    project = _project()
    listed = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    return {re.split(r"[\[<>=~! ]", item)[0].lower(): item for item in reversed(listed)}


def version() -> str:
    return str(_project()["version"])


def repository() -> str:
    """Where this comes from: the one address, for `uvx --from git+ADDRESS queuesmith`."""
    return str(_project()["urls"]["Repository"])


@functools.cache
def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project
