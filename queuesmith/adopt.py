"""`add`: copies pattern modules, and those of their tests that run elsewhere, into an existing project.

Nothing is written before everything is decided, an edited file is never overwritten unasked, and a file is
replaced in one step. `.queuesmith.json` in the project's root records what was written, with its hash.
If modules have moved upstream since, it says how to follow, and changes nothing.

From Python:

    project = Project.find(Path("src/app"))                      # or Path("."): flat; it need not exist
    adoption = plan(project, ["retry", "outside-call"], own={"labels.py": text})
    written = write(adoption)                                    # edited files stay as they are

`project.package` is the name to import from; `own` files belong to the project from the start.
"""

import contextlib
import difflib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from . import catalogue, proofs
from .catalogue import ROOT
from .moved import refuse_moved
from .project import PROOFS, Project, prefix_of
from .record import LOCK, OURS, Record, Refused, hash_of


@dataclass(frozen=True, slots=True)
class Change:
    path: str  # in the project, relative to its root
    origin: str | None  # in our repository; "": made for the project; None: the project's own
    state: str  # new, same, updated, kept (edited here, and upstream did not change), edited
    old: str
    new: str

    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.old.splitlines(True), self.new.splitlines(True), f"{self.path} (yours)", f"{self.path} (queuesmith)"
        )
        return "".join(lines)


@dataclass(slots=True)
class Adoption:
    project: Project
    patterns: list[str]
    changes: list[Change]
    requirements: list[str]  # to run the modules
    test_requirements: list[str] = field(default_factory=list)  # further ones, to run the tests
    on_request: list[str] = field(default_factory=list)  # only for PostgreSQL
    added: list[str] = field(default_factory=list)  # patterns asked for this time

    @property
    def edited(self) -> list[Change]:
        """For the user to decide: changed here, or not copied from here, and different upstream."""
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

    `own`: further files, path from the project's root -> text; they are not recorded, and an existing one
    that differs counts as edited. `also`: packages they need that no import shows.
    """
    record = Record.read(project.root)
    refuse_moved(project, record)
    before = record.packages.get(project.into, {}).get("patterns", [])
    patterns = [catalogue.find(ident) for ident in wanted]
    modules = set().union(*(pattern.modules for pattern in patterns))
    files: dict[str, str] = {}
    if with_proofs:
        proven = proofs.proofs_of(patterns, modules)
        modules |= proven.modules
        files = {f"{PROOFS}/{to}": origin for origin, to in proven.files.items()}
        if files:
            files[f"{PROOFS}/conftest.py"] = ""
    for name in sorted(modules):
        files[f"{project.modules}/{name}"] = f"{OURS}/{name}"
    changes = [change_of(project, record, path, origin) for path, origin in sorted(files.items())]
    own_files = dict(own or {})
    if project.prefix and not (project.root / project.into).exists():
        own_files.setdefault(project.path("__init__.py"), "")
    changes += [_own(project, path, text) for path, text in sorted(own_files.items())]
    chosen = sorted({*before, *(pattern.id for pattern in patterns)})
    needed = requirements_of(project, sorted(modules), changes, also)
    return Adoption(project, chosen, changes, *needed, added=[pattern.id for pattern in patterns])


def requirements_of(
    project: Project, modules: list[str], changes: Iterable[Change], also: Iterable[str] = ()
) -> tuple[list[str], list[str], list[str]]:
    """(to run, to test, for PostgreSQL)"""
    programs: set[str] = set()
    tests: set[str] = set()
    own = [PurePosixPath(change.path) for change in changes if change.origin is None]
    beside = {name for path in own for name in (path.stem, path.parts[0])}
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


def change_of(project: Project, record: Record, path: str, origin: str) -> Change:
    new = content(project, path, origin)
    file = project.root / path
    if not file.exists():
        return Change(path, origin, "new", "", new)
    old = file.read_text(encoding="utf-8", errors="replace")
    if old == new:
        return Change(path, origin, "same", old, new)
    written = record.packages.get(project.into, {}).get("files", {}).get(path, {}).get("sha256")
    state = "updated" if written == hash_of(old) else "kept" if written == hash_of(new) else "edited"
    return Change(path, origin, state, old, new)


def _own(project: Project, path: str, text: str) -> Change:
    file = project.root / path
    old = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return Change(path, None, "new" if not file.exists() else "same" if old == text else "edited", old, text)


def content(project: Project, path: str, origin: str) -> str:
    if not origin:
        return proofs.HEADER + proofs.conftest(project.source)
    text = (ROOT / origin).read_text(encoding="utf-8")
    if origin.startswith(f"{OURS}/"):
        return text  # byte for byte
    if origin.endswith("harness/processes.py"):
        text = text.replace("parents[2]", "parents[3]")
    return proofs.HEADER + proofs.adapted(text, project.package)


def write(adoption: Adoption, overwrite: Callable[[Change], bool] = lambda change: False) -> list[Change]:
    """Write what is new or updated, and the edited files that `overwrite` agrees to."""
    project = adoption.project
    chosen = [
        c for c in adoption.changes if c.state in ("new", "updated") or (c.state in ("edited", "kept") and overwrite(c))
    ]
    record = Record.read(project.root)
    entry = record.entry(project.into)
    entry["patterns"] = adoption.patterns
    if project.prefix != prefix_of(project.root, project.into):
        entry["prefix"] = project.prefix
    entry["files"] = {path: file for path, file in entry["files"].items() if not _gone(project, path, file["from"])}
    for change in [*chosen, *(c for c in adoption.changes if c.state == "same")]:
        if change.origin is not None:
            entry["files"][change.path] = {"from": change.origin, "sha256": hash_of(change.new)}
    replace(project.root, {**{change.path: change.new for change in chosen}, LOCK: record.text()})
    return chosen


def _gone(project: Project, path: str, origin: str) -> bool:
    """Neither here nor upstream any more."""
    return bool(origin) and not (ROOT / origin).is_file() and not (project.root / path).exists()


def replace(root: Path, contents: Mapping[str, str]) -> None:
    """Write all of these files, path from the root -> text, or none."""
    # Staged beside their targets first: a full disk or a missing permission leaves nothing half-written.
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
        raise Refused(f"cannot write {error.filename or ''}: {error.strerror}. Nothing was changed.") from error
    finally:
        for scratch, _ in staged:
            scratch.unlink(missing_ok=True)
        for folder in sorted(made, reverse=True) if not done else ():
            with contextlib.suppress(OSError):
                folder.rmdir()
