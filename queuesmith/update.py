"""`diff` and `adopt`: what changed since modules were copied, taking it over, and copies made by hand.

A renamed package is found again, a file deleted here stays deleted, and an edited one does not keep the others from
being updated: it stays as it is until somebody has merged it and says so (`diff --accept`).
"""

import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from . import catalogue
from .adopt import Adoption, Change, change_of, content, replace, requirements_of
from .catalogue import MODULES, ROOT
from .moved import MOVED, moved_in, refuse_moved
from .project import PROOFS, Project, prefix_of, root_around
from .record import LOCK, OURS, Record, Refused, folders, hash_of, module_name


def root_of(folder: Path) -> Path:
    """The project that `folder` belongs to: the nearest folder upwards that `queuesmith add` has written to."""
    return next((path for path in (folder, *folder.parents) if (path / LOCK).is_file()), folder)


def _read(root: Path) -> Record:
    if not (root / LOCK).is_file():
        # A monorepo's services, as deep as they usually are.
        below = sorted(path.parent.relative_to(root).as_posix() for n in (1, 2) for path in root.glob("*/" * n + LOCK))
        if below:
            raise Refused(f"{root} has no {LOCK}, but there is one in {', '.join(below)}: queuesmith diff {below[0]}")
        raise Refused(
            f"there is no {LOCK} in {root} or above it: it records what was copied. Run this where `queuesmith add` "
            "was run, add a pattern first, or record copies that were made by hand: queuesmith adopt"
        )
    return Record.read(root)


def _recorded(root: Path, into: str, entry: Mapping[str, Any]) -> Project:
    return Project(root, into, entry.get("prefix", prefix_of(root, into)))


# ---- diff


@dataclass(frozen=True, slots=True)
class Difference:
    path: str
    # unchanged, edited here, changed upstream, changed on both sides, gone here, gone upstream, moved upstream to …
    state: str
    diff: str

    @property
    def is_news(self) -> bool:
        return "upstream" in self.state or "both" in self.state


def differences(root: Path) -> tuple[Record, list[Difference]]:
    """(what is recorded, every file and how it differs from what `add` would bring now)"""
    record = _read(root)
    differences = []
    for into, entry in record.packages.items():
        project = _recorded(root, into, entry)
        moved = moved_in(project, entry["files"])
        for path, file in entry["files"].items():
            if path in moved:
                differences.append(Difference(path, f"moved upstream to {project.modules}/{MOVED[moved[path]]}", ""))
            else:
                differences.append(_difference(project, path, file))
    return record, differences


def _difference(project: Project, path: str, record: Mapping[str, str]) -> Difference:
    file = project.root / path
    if not file.is_file():
        return Difference(path, "gone here", "")
    if record["from"] and not (ROOT / record["from"]).is_file():
        return Difference(path, "gone upstream", "")
    local, upstream = file.read_text(encoding="utf-8", errors="replace"), content(project, path, record["from"])
    if local == upstream:
        return Difference(path, "unchanged", "")
    edited, changed = hash_of(local) != record["sha256"], hash_of(upstream) != record["sha256"]
    state = "changed on both sides" if edited and changed else "edited here" if edited else "changed upstream"
    return Difference(path, state, Change(path, record["from"], state, local, upstream).diff())


def plan_update(root: Path) -> list[Adoption]:
    """What `diff --apply` would do: the recorded files as they are upstream now, and modules they now need."""
    record = _read(root)
    result = []
    for into, entry in record.packages.items():
        project = _recorded(root, into, entry)
        refuse_moved(project, record)
        files = {
            path: file["from"]
            for path, file in entry["files"].items()
            if (root / path).is_file() and (not file["from"] or (ROOT / file["from"]).is_file())
        }
        # Only where `add` puts them; a copy elsewhere has its own imports.
        modules = [
            module_name(origin) for path, origin in files.items() if path == f"{project.modules}/{module_name(origin)}"
        ]
        for name in catalogue.closure(modules) if modules else ():
            if f"{project.modules}/{name}" not in entry["files"]:
                files[f"{project.modules}/{name}"] = f"{OURS}/{name}"
        changes = [change_of(project, record, path, origin) for path, origin in sorted(files.items())]
        needed = requirements_of(project, catalogue.closure(modules), changes)
        result.append(Adoption(project, entry["patterns"], changes, *needed))
    return result


def accept(root: Path, paths: Iterable[Path]) -> list[str]:
    """These files were merged by hand: from now on they count as edited, not behind."""
    record = _read(root)
    done = []
    for path in paths:
        name = path.resolve().relative_to(root).as_posix() if path.resolve().is_relative_to(root) else ""
        into = next((into for into, entry in record.packages.items() if name in entry["files"]), None)
        if into is None or not (root / name).is_file():
            raise Refused(f"{path} is not recorded in {root / LOCK}; `queuesmith diff` lists what is")
        project = _recorded(root, into, record.packages[into])
        file = record.packages[into]["files"][name]
        file["sha256"] = hash_of(content(project, name, file["from"]))
        done.append(name)
    replace(root, {LOCK: record.text()})
    return done


# ---- adopt


@dataclass(frozen=True, slots=True)
class Copy:
    path: str  # in the project, relative to its root
    module: str
    state: str  # unchanged, older, similar
    base: str  # hash of our file that it was made from; empty: unknown


SIMILAR = 0.5  # of the lines of both together; a module that was shortened or extended a lot is not found


def adopt(folder: Path, *, dry_run: bool = False) -> tuple[Path, list[Copy]]:
    """(the project, copies in `folder` that are recorded only now, so that `diff` knows them)"""
    folder = folder.resolve()
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder; name the one with the copies")
    root = root_of(folder)
    root = root if (root / LOCK).is_file() else root_around(folder, Path.cwd().resolve())
    record = Record.read(root)
    for into in record.gone(root):
        del record.packages[into]
    known = {path for entry in record.packages.values() for path in entry["files"]}
    copies = [copy for copy in _copies(root, folder) if copy.path not in known]
    for copy in copies:
        place = PurePosixPath(copy.path)
        usual = f"/{copy.path}".endswith(f"/patterns/{copy.module}")
        up = len(PurePosixPath(copy.module).parts) + 1 if usual else 1
        entry = record.entry(PurePosixPath(*place.parts[:-up]).as_posix())
        entry["files"][copy.path] = {"from": f"{OURS}/{copy.module}", "sha256": copy.base}
    for into, entry in record.packages.items():
        _record_inits(root, into, entry["files"])
        modules = {module_name(file["from"]) for file in entry["files"].values()}
        held = {pattern.id for pattern in catalogue.patterns().values() if pattern.own[0] in modules}
        entry["patterns"] = sorted({*entry["patterns"], *held})
    if not dry_run and (copies or (root / LOCK).is_file()):
        replace(root, {LOCK: record.text()})
    return root, copies


def _record_inits(root: Path, into: str, files: dict[str, dict[str, str]]) -> None:
    """The `__init__.py` of the packages: too short to tell apart, so recognised by their place."""
    here = PurePosixPath(into, "patterns").as_posix()
    modules = [path.removeprefix(f"{here}/") for path in files if path.startswith(f"{here}/")]
    for name in catalogue.closure(name for name in modules if (MODULES / name).is_file()):
        if name.endswith("__init__.py") and (root / here / name).is_file():
            text = (MODULES / name).read_text(encoding="utf-8")
            files.setdefault(f"{here}/{name}", {"from": f"{OURS}/{name}", "sha256": hash_of(text)})


def _copies(root: Path, folder: Path) -> Iterator[Copy]:
    texts = {
        path.relative_to(MODULES).as_posix(): path.read_text(encoding="utf-8")
        for path in MODULES.rglob("*.py")
        if path.name != "__init__.py"
    }
    ours = {hash_of(text): name for name, text in texts.items()}
    lines = {name: _lines(text) for name, text in texts.items()}
    older = _older()
    for place in folders(folder):
        for path in sorted(place.glob("*.py")):
            where = path.relative_to(root).as_posix()
            if where.startswith(f"{PROOFS}/") or path.name == "__init__.py":
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if name := ours.get(hash_of(text)):
                yield Copy(where, name, "unchanged", hash_of(text))
            elif name := older.get(_blob(text)):
                yield Copy(where, name, "older", hash_of(text))
            elif name := _most_similar(_lines(text), lines):
                yield Copy(where, name, "similar", "")


def _lines(text: str) -> frozenset[str]:
    """What a module can be recognised by: imports change with the place."""
    lines = {line.strip() for line in text.splitlines()}
    return frozenset(line for line in lines if len(line) > 12 and not line.startswith(("from ", "import ")))


def _most_similar(local: frozenset[str], lines: Mapping[str, frozenset[str]]) -> str | None:
    score, name = max((len(local & upstream) / (len(local | upstream) or 1), name) for name, upstream in lines.items())
    return name if score >= SIMILAR and len(local) >= 10 else None


def _blob(text: str) -> str:
    """The name that git gives this content."""
    data = text.encode()
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()


def _older() -> dict[str, str]:
    """Git's name of every earlier content of our modules -> module; empty without our history."""
    if not (ROOT / ".git").exists() or not (git := shutil.which("git")):
        return {}
    command = [git, "-C", str(ROOT), "log", "--format=", "--raw", "--no-abbrev", "--no-renames", "--", OURS]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    result = {}
    for line in output.splitlines():
        change, _, path = line.partition("\t")
        if path.endswith(".py"):
            result[change.split()[3]] = module_name(path)
    return result
