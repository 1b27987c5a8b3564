"""Where modules go in an existing project, and the name they are imported by."""

from __future__ import annotations

import itertools
import keyword
import os
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from . import catalogue
from .record import Record, Refused

PROOFS = "tests/patterns"


@dataclass(frozen=True, slots=True)
class Project:
    """Where modules go: into `modules` below `root`, imported as `package`."""

    root: Path
    into: str  # the folder that gets them, relative to the root: `src/app`, `.`
    prefix: str  # its dotted name: `app`; empty for a flat folder, whose files import each other by their names

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
                raise Refused(f"{path} is a file; name the folder for patterns/, like src/app")
        root = root_around(folder, here)
        where = folder.relative_to(root).as_posix()
        prefix = prefix_of(root, where)
        if package is not None:
            prefix = package.removesuffix("patterns").removesuffix(".")
            if package.split(".")[-1] != "patterns" or not folder.as_posix().endswith(prefix.replace(".", "/")):
                raise Refused(
                    f"--package {package}: the modules go to {where}/patterns, so their name ends like that: "
                    f"{'.'.join(filter(None, (prefix_of(root, where), 'patterns')))}, or patterns for flat imports"
                )
        for part in filter(None, prefix.split(".")):
            if not part.isidentifier() or keyword.iskeyword(part):
                raise Refused(
                    f"{into or folder} cannot be imported: {part!r} is no Python name. Name the package, like "
                    f"src/app, or go into the folder and use --into . if its files import each other by their names"
                )
        top = prefix.split(".")[0]
        if not (folder / "__init__.py").is_file() and (top in sys.stdlib_module_names or top in catalogue.pinned()):
            raise Refused(f"{into or folder}: a package {top} would hide the {top} that others import; rename it")
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

    def with_modules(self) -> Project:
        """The folder above this one that has modules already, or this one."""
        packages = Record.read(self.root).packages
        for into in (self.into, *(path.as_posix() for path in PurePosixPath(self.into).parents)):
            if into in packages:
                return Project(self.root, into, packages[into].get("prefix", prefix_of(self.root, into)))
        return self

    @property
    def source(self) -> str:
        """The folder to import from, seen from the proofs."""
        folder = self.root / self.into
        for _ in filter(None, self.prefix.split(".")):
            folder = folder.parent
        return Path(os.path.relpath(folder, self.root / PROOFS)).as_posix()


SOURCES = ("src", "lib", "python")  # folders that are put on the path, not imported
NO_PACKAGES = {"tests", "test", "docs", "doc", "examples", "scripts", "patterns", "migrations", "build", "dist"}


def _only_package(here: Path) -> Path:
    """The package that `add` means without `--into`."""
    recorded: list[str] = list(Record.read(here).packages)
    if len(recorded) == 1:
        return here / recorded[0]
    beside = [path.parent for path in here.glob("[!.]*/__init__.py")]
    inside = [path.parent for path in here.glob("src/[!.]*/*.py")]
    packages = sorted(path.relative_to(here).as_posix() for path in {*beside, *inside} if path.name not in NO_PACKAGES)
    if len(packages) == 1:
        return here / packages[0]
    looked = f"looked in {here} and its src/ for a folder with __init__.py"
    if packages:
        raise Refused(f"{looked}, there are several. Name one: --into {' or --into '.join(packages)}")
    raise Refused(
        f"{looked}, there is none. Name the folder: --into src/app (imported as app.patterns; it is made if it is "
        "missing), or --into . (flat: imported as patterns)"
    )


def root_around(folder: Path, here: Path) -> Path:
    """The project of `folder`: where the record and tests/ belong."""
    above = [folder, *folder.parents]
    if here in above and not (here / "__init__.py").is_file():
        # Never write above the folder we were called in: that is somebody else's project.
        above = above[: above.index(here) + 1]
    for mark in ("pyproject.toml", "setup.py", ".git"):
        if marked := next((path for path in above if (path / mark).exists()), None):
            return marked
    if here in above and not (here / "__init__.py").is_file():
        return here
    return next(path for path in above if not (path / "__init__.py").is_file())


def prefix_of(root: Path, into: str) -> str:
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
