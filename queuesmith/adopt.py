"""`add` and `diff`: pattern modules and their proofs in an existing project, and what has changed since.

Nothing is written before everything is decided, an edited file is never overwritten unasked, and a file is
replaced in one step. `.queuesmith.json` in the project's root records what was written, with its hash.
A project whose modules have moved upstream since is told how to come along, and nothing of it is changed.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import keyword
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from . import catalogue, proofs
from .catalogue import MODULES, ROOT
from .moved import MOVED, new_import

__all__ = ["Adoption", "Change", "Project", "Refused", "differences", "plan", "plan_update", "write"]

LOCK = ".queuesmith.json"
PROOFS = "tests/patterns"


class Refused(Exception):
    """What cannot be done, and what to do instead. Nothing was written."""


@dataclass(frozen=True, slots=True)
class Project:
    root: Path
    into: str  # the package's folder, relative to the root: src/app

    @classmethod
    def find(cls, into: Path) -> Project:
        folder = into.resolve()
        if not folder.is_dir():
            raise Refused(
                f"{into} is not a folder; name the package that shall get the modules, like src/app"
            )
        above = [folder, *folder.parents]
        here = Path.cwd().resolve()
        if here in above:  # never write above the folder we were called in: that is somebody else's project
            above = above[: above.index(here) + 1]
        root = next((path for path in above if (path / "pyproject.toml").is_file()), None)
        root = root or next((path for path in above if (path / ".git").exists()), here)
        if root == folder or not folder.is_relative_to(root):
            raise Refused(
                f"{into} is not inside a project; name the package that shall get the modules, like src/app"
            )
        project = cls(root, folder.relative_to(root).as_posix())
        for part in project.package.split("."):
            if not part.isidentifier() or keyword.iskeyword(part):
                raise Refused(f"{into} cannot be imported: {part!r} is no Python name")
        return project

    @property
    def package(self) -> str:
        """The dotted name of the folder with the modules."""
        return ".".join([*self._dotted, "patterns"])

    @property
    def _dotted(self) -> tuple[str, ...]:
        parts = PurePosixPath(self.into).parts
        return parts[1:] if parts[0] in ("src", "lib", "python") and len(parts) > 1 else parts

    @property
    def source(self) -> str:
        """The folder to import from, seen from the proofs."""
        top = PurePosixPath(self.into).parts[: -len(self._dotted)]
        return "/".join(["..", "..", *top])


@dataclass(frozen=True, slots=True)
class Change:
    path: str  # in the project, relative to its root
    origin: str  # in our repository
    state: str  # new, same, updated, edited
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
    requirements: list[str]
    left: dict[str, str] = field(default_factory=dict)  # proofs that stay upstream, and why

    @property
    def edited(self) -> list[Change]:
        return [change for change in self.changes if change.state == "edited"]


def plan(project: Project, wanted: Iterable[str], *, with_proofs: bool = True) -> Adoption:
    """What `add` would do."""
    lock = _lock(project)
    _refuse_moved(project, lock)
    before = lock["packages"].get(project.into, {}).get("patterns", [])
    patterns = [catalogue.find(ident) for ident in wanted]
    modules = set().union(*(pattern.modules for pattern in patterns))
    files = {}
    left: dict[str, str] = {}
    if with_proofs:
        found = proofs.proofs_of(patterns, modules)
        modules |= found.modules
        left = found.left
        files = {f"{PROOFS}/{to}": origin for origin, to in found.files.items()}
        if files:
            files[f"{PROOFS}/conftest.py"] = ""
    for name in sorted(modules):
        files[f"{project.into}/patterns/{name}"] = (MODULES / name).relative_to(ROOT).as_posix()
    changes = [_change(project, lock, path, origin) for path, origin in sorted(files.items())]
    chosen = sorted({*before, *(pattern.id for pattern in patterns)})
    return Adoption(project, chosen, changes, catalogue.packages(sorted(modules)), left)


def plan_update(root: Path) -> list[Adoption]:
    """What `diff --apply` would do: the recorded files as they are upstream now, and modules they have come to need."""
    lock = _read_lock(root)
    found = []
    for into, entry in lock["packages"].items():
        project = Project(root, into)
        _refuse_moved(project, lock)
        files = {path: record["from"] for path, record in entry["files"].items()}
        files = {path: origin for path, origin in files.items() if not origin or (ROOT / origin).is_file()}
        here = f"{into}/patterns/"
        modules = [path.removeprefix(here) for path in files if path.startswith(here)]
        for name in catalogue.closure(modules):
            files[here + name] = (MODULES / name).relative_to(ROOT).as_posix()
        changes = [_change(project, lock, path, origin) for path, origin in sorted(files.items())]
        # Edited here and not changed upstream is nobody's business.
        copied = {path: record["sha256"] for path, record in entry["files"].items()}
        changes = [c for c in changes if c.state != "edited" or _hash(c.new) != copied.get(c.path)]
        found.append(Adoption(project, entry["patterns"], changes, catalogue.packages(modules)))
    return found


def _gone(project: Project, path: str, record: dict[str, str]) -> bool:
    """Neither here nor upstream any more."""
    return (
        bool(record["from"]) and not (ROOT / record["from"]).is_file() and not (project.root / path).exists()
    )


def _moved(project: Project, files: dict[str, dict[str, str]]) -> dict[str, str]:
    """Files of this project whose module lies elsewhere upstream -> their old module."""
    here = MODULES.relative_to(ROOT).as_posix()
    old = {path: record["from"].removeprefix(f"{here}/") for path, record in files.items()}
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
        f"{len(moved)} modules in {project.into}/patterns have moved since {lock['queuesmith']}. Nothing was written.",
        "To bring the project over:",
        "",
        "1. Commit what you have."
        + (f" Edited here, carry it over afterwards: {', '.join(edited)}" if edited else ""),
        "2. Remove the old files, of which these come back in their new places:",
        *(f"     {path} -> {project.into}/patterns/{MOVED[name]}" for path, name in moved.items()),
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
    return Change(path, origin, "updated" if written == _hash(old) else "edited", old, new)


def _content(project: Project, path: str, origin: str) -> str:
    if not origin:
        return proofs.conftest(project.source)
    text = (ROOT / origin).read_text(encoding="utf-8")
    if not path.startswith(f"{PROOFS}/"):
        return text  # byte for byte
    if path.endswith("proof_harness/processes.py"):
        text = text.replace("parents[2]", "parents[3]")
    return proofs.adapted(text, project.package)


def write(adoption: Adoption, overwrite: Callable[[Change], bool]) -> list[Change]:
    """Write what is new or updated, and of what was edited that for which `overwrite` says yes."""
    project = adoption.project
    chosen = [
        c for c in adoption.changes if c.state in ("new", "updated") or (c.state == "edited" and overwrite(c))
    ]
    lock = _lock(project)
    entry = lock["packages"].setdefault(project.into, {"patterns": [], "files": {}})
    entry["patterns"] = adoption.patterns
    entry["files"] = {
        path: record for path, record in entry["files"].items() if not _gone(project, path, record)
    }
    for change in [*chosen, *(c for c in adoption.changes if c.state == "same")]:
        entry["files"][change.path] = {"from": change.origin, "sha256": _hash(change.new)}
    lock["queuesmith"] = catalogue.version()
    entry["files"] = dict(sorted(entry["files"].items()))
    contents = {change.path: change.new for change in chosen}
    contents[LOCK] = json.dumps(lock, indent=2) + "\n"
    # All of it beside its place first: a full disk or a missing permission leaves no half of it behind.
    staged: list[tuple[Path, Path]] = []
    made: list[Path] = []
    done = False
    try:
        for path, text in contents.items():
            target = project.root / path
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
    return chosen


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
        project = Project(root, into)
        moved = _moved(project, entry["files"])
        for path, record in entry["files"].items():
            if path in moved:
                found.append(Difference(path, f"moved upstream to {into}/patterns/{MOVED[moved[path]]}", ""))
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
            f"there is no {LOCK} in {root}; run it where `queuesmith add` was run, or add a pattern first"
        )
    return _lock(Project(root, "."))


def _lock(project: Project) -> dict[str, Any]:
    path = project.root / LOCK
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
