"""`add`, `diff` and `adopt`: pattern modules and their tests in an existing project, and what has changed since.

Nothing is written before everything is decided, an edited file is never overwritten unasked, and a file is
replaced in one step. `.queuesmith.json` in the project's root records what was written, with its hash.
A project whose modules have moved upstream since is told how to come along, and nothing of it is changed.

For programs, and for other commands that bring modules along:

    project = Project.find(Path("src/app"))                      # or Path("."): flat; it need not exist
    adoption = plan(project, ["retry", "outside-call"], own={"labels.py": text})
    written = write(adoption)                                    # what was edited stays as it is

`project.package` is the name to import from, `own` are files that are the project's from the first moment.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import keyword
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from . import catalogue, proofs
from .catalogue import MODULES, ROOT
from .moved import MOVED, new_import

__all__ = ["Adoption", "Change", "Project", "Refused", "differences", "plan", "plan_update", "write"]

LOCK = ".queuesmith.json"
PROOFS = "tests/patterns"
OURS = MODULES.relative_to(ROOT).as_posix()


class Refused(Exception):
    """What cannot be done, and what to do instead. Nothing was written."""


@dataclass(frozen=True, slots=True)
class Project:
    """Where modules go: into `modules` below `root`, imported as `package`."""

    root: Path
    into: str  # the folder that gets them, relative to the root: `src/app`, `.`
    prefix: (
        str  # its dotted name: `app`; empty for a flat folder, whose files import each other by their names
    )

    @classmethod
    def find(cls, into: Path | None = None, *, package: str | None = None) -> Project:
        """The project around `into`, which need not exist yet; without it, the one package there is.

        `package` is the import name of the modules where it is guessed wrong: `app.patterns`, or `patterns` (flat).
        """
        here = Path.cwd().resolve()
        folder = into.resolve() if into else _only_package(here)
        if folder.name == "patterns" and into:
            folder = folder.parent
        for path in (folder, *folder.parents):
            if path.exists() and not path.is_dir():
                raise Refused(f"{path} is a file; name the folder that shall get patterns/, like src/app")
        root = _root(folder, here)
        where = folder.relative_to(root).as_posix()
        prefix = _prefix(root, where)
        if package is not None:
            prefix = package.removesuffix("patterns").removesuffix(".")
            if package.split(".")[-1] != "patterns" or not folder.as_posix().endswith(
                prefix.replace(".", "/")
            ):
                raise Refused(
                    f"--package {package}: the modules go to {where}/patterns, so their name ends like that: "
                    f"{'.'.join(filter(None, (_prefix(root, where), 'patterns')))}, or patterns for flat imports"
                )
        for part in filter(None, prefix.split(".")):
            if not part.isidentifier() or keyword.iskeyword(part):
                raise Refused(
                    f"{into or folder} cannot be imported: {part!r} is no Python name. Name the package, like "
                    f"src/app, or go into the folder and use --into . if its files import each other by their names"
                )
        return cls(root, where, prefix)

    @property
    def package(self) -> str:
        """The dotted name of the folder with the modules: `from PACKAGE.retry import …`."""
        return f"{self.prefix}.patterns" if self.prefix else "patterns"

    @property
    def modules(self) -> str:
        """The folder with the modules, relative to the root."""
        return self.path("patterns")

    def path(self, name: str) -> str:
        """`name` in the folder that gets the modules, relative to the root."""
        return PurePosixPath(self.into, name).as_posix()

    @property
    def source(self) -> str:
        """The folder to import from, seen from the proofs."""
        folder = self.root / self.into
        for _ in filter(None, self.prefix.split(".")):
            folder = folder.parent
        return Path(os.path.relpath(folder, self.root / PROOFS)).as_posix()


SOURCES = ("src", "lib", "python")  # folders that are put on the path, not imported
NO_PACKAGES = {
    "tests",
    "test",
    "docs",
    "doc",
    "examples",
    "scripts",
    "patterns",
    "migrations",
    "build",
    "dist",
}


def _only_package(here: Path) -> Path:
    """The package that `add` means without `--into`."""
    recorded: list[str] = list(_lock(here)["packages"])
    if len(recorded) == 1:
        return here / recorded[0]
    beside = [path.parent for path in here.glob("[!.]*/__init__.py")]
    inside = [path.parent for path in here.glob("src/[!.]*/*.py")]
    found = sorted(
        path.relative_to(here).as_posix() for path in {*beside, *inside} if path.name not in NO_PACKAGES
    )
    if len(found) == 1:
        return here / found[0]
    looked = f"looked in {here} and its src/ for a folder with __init__.py"
    if found:
        raise Refused(f"{looked}, there are several. Name one: --into {' or --into '.join(found)}")
    raise Refused(
        f"{looked}, there is none. Name the folder: --into src/app (imported as app.patterns; it is made if it is "
        "missing), or --into . (flat: imported as patterns)"
    )


def _root(folder: Path, here: Path) -> Path:
    """The project of `folder`: what records are kept in, and tests/ beside."""
    above = [folder, *folder.parents]
    if here in above and not (here / "__init__.py").is_file():
        # Never write above the folder we were called in: that is somebody else's project.
        above = above[: above.index(here) + 1]
    for mark in ("pyproject.toml", "setup.py", ".git"):
        if found := next((path for path in above if (path / mark).exists()), None):
            return found
    if here in above and not (here / "__init__.py").is_file():
        return here
    return next(path for path in above if not (path / "__init__.py").is_file())


def _prefix(root: Path, into: str) -> str:
    """The dotted name of the folder `into`: below src/ by its path, else as far up as there are __init__.py."""
    parts = PurePosixPath(into).parts
    if parts[:1] and parts[0] in SOURCES:
        parts = parts[1:]
    if "src" in parts:
        return ".".join(parts[len(parts) - parts[::-1].index("src") :])
    if (root / into / "__init__.py").is_file() and PurePosixPath(into).parts[0] not in SOURCES:
        chain = [path for path in (root / into, *(root / into).parents) if path.is_relative_to(root)]
        names = itertools.takewhile(lambda path: (path / "__init__.py").is_file(), chain)
        return ".".join(path.name for path in list(names)[::-1])
    return ".".join(parts)


@dataclass(frozen=True, slots=True)
class Change:
    path: str  # in the project, relative to its root
    origin: str | None  # in our repository; "": made for the project; None: the project's own from now on
    state: str  # new, same, updated, kept (edited here, and upstream did not change), edited
    old: str
    new: str

    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.old.splitlines(True),
            self.new.splitlines(True),
            f"{self.path} (yours)",
            f"{self.path} (queuesmith)",
        )
        return "".join(lines)


@dataclass(slots=True)
class Adoption:
    project: Project
    patterns: list[str]
    changes: list[Change]
    requirements: list[str]  # to run the modules
    test_requirements: list[str] = field(
        default_factory=list
    )  # to run the tests that come along, beside those
    on_request: list[str] = field(default_factory=list)  # for PostgreSQL alone

    @property
    def edited(self) -> list[Change]:
        """What only somebody can decide: changed here, or never from here, and different upstream."""
        return [change for change in self.changes if change.state == "edited"]


def plan(
    project: Project,
    wanted: Iterable[str],
    *,
    with_proofs: bool = True,
    own: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
) -> Adoption:
    """What `add` would do.

    `own`: further files, path from the project's root -> text; they are not recorded, and one that is there and
    different counts as edited. `also`: packages that those need and no import tells.
    """
    lock = _lock(project.root)
    _refuse_moved(project, lock)
    before = lock["packages"].get(project.into, {}).get("patterns", [])
    patterns = [catalogue.find(ident) for ident in wanted]
    modules = set().union(*(pattern.modules for pattern in patterns))
    files: dict[str, str] = {}
    if with_proofs:
        found = proofs.proofs_of(patterns, modules)
        modules |= found.modules
        files = {f"{PROOFS}/{to}": origin for origin, to in found.files.items()}
        if files:
            files[f"{PROOFS}/conftest.py"] = ""
    for name in sorted(modules):
        files[f"{project.modules}/{name}"] = f"{OURS}/{name}"
    changes = [_change(project, lock, path, origin) for path, origin in sorted(files.items())]
    mine = dict(own or {})
    if project.prefix and not (project.root / project.into).exists():
        mine.setdefault(project.path("__init__.py"), "")
    changes += [_own(project, path, text) for path, text in sorted(mine.items())]
    chosen = sorted({*before, *(pattern.id for pattern in patterns)})
    return Adoption(project, chosen, changes, *_requirements(project, sorted(modules), changes, also))


def _requirements(
    project: Project, modules: list[str], changes: Iterable[Change], also: Iterable[str] = ()
) -> tuple[list[str], list[str], list[str]]:
    """(to run, to test, for PostgreSQL)"""
    programs: set[str] = set()
    tests: set[str] = set()
    beside = {PurePosixPath(change.path).stem for change in changes if change.origin is None}
    local = {"patterns", project.prefix.split(".")[0], "proof_harness", *beside}
    for change in changes:
        if change.path.endswith(".py") and not change.path.startswith(f"{project.modules}/"):
            kind = tests if change.path.startswith("tests/") else programs
            kind |= catalogue.imported(change.new) - local
    needed = catalogue.packages(modules, imported=programs, also=also)
    testing = catalogue.packages((), imported=tests, postgres=True)
    request = catalogue.packages(modules, imported=programs, postgres=True)
    return (
        needed,
        [item for item in testing if item not in needed],
        [item for item in request if item not in (*needed, *testing)],
    )


def plan_update(root: Path) -> list[Adoption]:
    """What `diff --apply` would do: the recorded files as they are upstream now, and modules they have come to need.

    A file that was deleted here stays deleted.
    """
    lock = _read_lock(root)
    found = []
    for into, entry in lock["packages"].items():
        project = _recorded(root, into, entry)
        _refuse_moved(project, lock)
        files = {
            path: record["from"]
            for path, record in entry["files"].items()
            if (root / path).is_file() and (not record["from"] or (ROOT / record["from"]).is_file())
        }
        # Only of what lies where `add` puts it: a copy elsewhere has imports of its own.
        here = {f"{project.modules}/{_name(origin)}": _name(origin) for origin in files.values()}
        modules = [name for path, name in here.items() if path in files]
        for name in catalogue.closure(modules) if modules else ():
            if f"{project.modules}/{name}" not in entry["files"]:
                files[f"{project.modules}/{name}"] = f"{OURS}/{name}"
        changes = [_change(project, lock, path, origin) for path, origin in sorted(files.items())]
        needed = _requirements(project, catalogue.closure(modules), changes)
        found.append(Adoption(project, entry["patterns"], changes, *needed))
    return found


def _recorded(root: Path, into: str, entry: Mapping[str, Any]) -> Project:
    return Project(root, into, entry.get("prefix", _prefix(root, into)))


def _name(origin: str) -> str:
    """`reference/studyhall/patterns/core/errors.py` -> `core/errors.py`"""
    return origin.removeprefix(f"{OURS}/")


def _gone(project: Project, path: str, record: dict[str, str]) -> bool:
    """Neither here nor upstream any more."""
    return (
        bool(record["from"]) and not (ROOT / record["from"]).is_file() and not (project.root / path).exists()
    )


def _moved(project: Project, files: dict[str, dict[str, str]]) -> dict[str, str]:
    """Files of this project whose module lies elsewhere upstream -> their old module."""
    old = {path: _name(record["from"]) for path, record in files.items()}
    return {
        path: name
        for path, name in old.items()
        if name in MOVED and not (MODULES / name).is_file() and (project.root / path).is_file()
    }


def _refuse_moved(project: Project, lock: dict[str, Any]) -> None:
    """Half of the old layout and half of the new one would not run, and moving is not all: imports change too."""
    entry = lock["packages"].get(project.into, {"patterns": [], "files": {}})
    moved = _moved(project, entry["files"])
    if not moved:
        return
    edited = [
        path
        for path in moved
        if _hash((project.root / path).read_text(encoding="utf-8", errors="replace"))
        != entry["files"][path]["sha256"]
    ]
    new = {MOVED[name] for name in moved.values()} | {PurePosixPath(path).name for path in entry["files"]}
    present = {one.id for one in catalogue.patterns().values() if one.own[0] in new}
    patterns = entry["patterns"] or sorted(present)
    imports = {name.removesuffix(".py"): new_import(name) for name in moved.values()}
    changed = {old: now for old, now in sorted(imports.items()) if old != now}
    lines = [
        f"{len(moved)} modules in {project.modules} have moved since {lock['queuesmith']}. Nothing was written.",
        "To bring the project over:",
        "",
        "1. Commit what you have."
        + (f" Edited here, carry it over afterwards: {', '.join(edited)}" if edited else ""),
        "2. Remove the old files, of which these come back in their new places:",
        *(f"     {path} -> {project.modules}/{MOVED[name]}" for path, name in moved.items()),
        f"3. queuesmith add {' '.join(patterns)} --into {project.into}",
        "4. Change the imports in your code, and the calls that CHANGELOG.md names:",
        *(f"     {project.package}.{old} -> {project.package}.{now}" for old, now in changed.items()),
    ]
    raise Refused("\n".join(lines))


def _change(project: Project, lock: dict[str, Any], path: str, origin: str) -> Change:
    new = _content(project, path, origin)
    file = project.root / path
    if not file.exists():
        return Change(path, origin, "new", "", new)
    old = file.read_text(encoding="utf-8", errors="replace")
    if old == new:
        return Change(path, origin, "same", old, new)
    written = lock["packages"].get(project.into, {}).get("files", {}).get(path, {}).get("sha256")
    state = "updated" if written == _hash(old) else "kept" if written == _hash(new) else "edited"
    return Change(path, origin, state, old, new)


def _own(project: Project, path: str, text: str) -> Change:
    file = project.root / path
    old = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return Change(path, None, "new" if not file.exists() else "same" if old == text else "edited", old, text)


def _content(project: Project, path: str, origin: str) -> str:
    if not origin:
        return proofs.HEADER + proofs.conftest(project.source)
    text = (ROOT / origin).read_text(encoding="utf-8")
    if origin.startswith(f"{OURS}/"):
        return text  # byte for byte
    if origin.endswith("harness/processes.py"):
        text = text.replace("parents[2]", "parents[3]")
    return proofs.HEADER + proofs.adapted(text, project.package)


def write(adoption: Adoption, overwrite: Callable[[Change], bool] = lambda change: False) -> list[Change]:
    """Write what is new or updated, and of what was edited that for which `overwrite` says yes."""
    project = adoption.project
    chosen = [
        c for c in adoption.changes if c.state in ("new", "updated") or (c.state == "edited" and overwrite(c))
    ]
    lock = _lock(project.root)
    entry = lock["packages"].setdefault(project.into, {"patterns": [], "files": {}})
    entry["patterns"] = adoption.patterns
    if project.prefix != _prefix(project.root, project.into):
        entry["prefix"] = project.prefix
    entry["files"] = {
        path: record for path, record in entry["files"].items() if not _gone(project, path, record)
    }
    for change in [*chosen, *(c for c in adoption.changes if c.state == "same")]:
        if change.origin is not None:
            entry["files"][change.path] = {"from": change.origin, "sha256": _hash(change.new)}
    lock["queuesmith"] = catalogue.version()
    entry["files"] = dict(sorted(entry["files"].items()))
    contents = {change.path: change.new for change in chosen}
    contents[LOCK] = json.dumps(lock, indent=2) + "\n"
    _replace(project.root, contents)
    return chosen


def _replace(root: Path, contents: Mapping[str, str]) -> None:
    """All of these files, path from the root -> text, or none of them."""
    # All of it beside its place first: a full disk or a missing permission leaves no half of it behind.
    staged: list[tuple[Path, Path]] = []
    made: list[Path] = []
    done = False
    try:
        for path, text in contents.items():
            target = root / path
            made += [parent for parent in target.parents if not parent.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=".queuesmith-")
            staged.append((Path(name), target))
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as out:
                out.write(text)
            Path(name).chmod(0o644)
        for scratch, target in staged:
            scratch.replace(target)
        done = True
    except OSError as error:
        raise Refused(
            f"cannot write {error.filename or ''}: {error.strerror}. Nothing was changed."
        ) from error
    finally:
        for scratch, _ in staged:
            scratch.unlink(missing_ok=True)
        for folder in sorted(made, reverse=True) if not done else ():
            with contextlib.suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True, slots=True)
class Difference:
    path: str
    # unchanged, edited here, changed upstream, changed on both sides, gone here, gone upstream, moved upstream to …
    state: str
    diff: str


def differences(root: Path) -> tuple[str, list[Difference]]:
    """(version that was copied, every file and how it differs from what `add` would bring now)"""
    lock = _read_lock(root)
    found = []
    for into, entry in lock["packages"].items():
        project = _recorded(root, into, entry)
        moved = _moved(project, entry["files"])
        for path, record in entry["files"].items():
            if path in moved:
                found.append(
                    Difference(path, f"moved upstream to {project.modules}/{MOVED[moved[path]]}", "")
                )
            else:
                found.append(_difference(project, path, record))
    return str(lock["queuesmith"]), found


def _difference(project: Project, path: str, record: dict[str, str]) -> Difference:
    file = project.root / path
    if not file.is_file():
        return Difference(path, "gone here", "")
    if record["from"] and not (ROOT / record["from"]).is_file():
        return Difference(path, "gone upstream", "")
    mine, theirs = file.read_text(encoding="utf-8", errors="replace"), _content(project, path, record["from"])
    if mine == theirs:
        return Difference(path, "unchanged", "")
    edited, changed = _hash(mine) != record["sha256"], _hash(theirs) != record["sha256"]
    state = {
        (False, False): "unchanged",
        (True, False): "edited here",
        (False, True): "changed upstream",
        (True, True): "changed on both sides",
    }[edited, changed]
    return Difference(path, state, Change(path, record["from"], state, mine, theirs).diff())


def root_of(folder: Path) -> Path:
    """The project that `folder` belongs to: the nearest folder upwards that `queuesmith add` has written to."""
    return next((path for path in (folder, *folder.parents) if (path / LOCK).is_file()), folder)


def _read_lock(root: Path) -> dict[str, Any]:
    if not (root / LOCK).is_file():
        raise Refused(
            f"there is no {LOCK} in {root} or above it: it records what was copied. Run this where `queuesmith add` "
            "was run, add a pattern first, or record copies made by hand: queuesmith adopt"
        )
    return _lock(root)


def _lock(root: Path) -> dict[str, Any]:
    path = root / LOCK
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        lock = {"queuesmith": "", "packages": {}, **found}
        for entry in lock["packages"].values():
            for record in (*entry["files"].values(), {"from": "", "sha256": ""}):
                _ = entry["patterns"], record["from"], record["sha256"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(
            f"{path} is damaged ({error}); restore it from git, or delete it to start afresh"
        ) from None
    return lock


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
