"""`.queuesmith.json`: what was copied into a project, from which file of ours, and the hash of what was taken.

The hash is of our file as it was taken, or last merged by hand. If the copy's hash differs, it was edited here; if
our file's differs, it changed upstream.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from . import catalogue
from .catalogue import MODULES, ROOT

LOCK = ".queuesmith.json"
OURS = MODULES.relative_to(ROOT).as_posix()
NOT_OURS = {"node_modules", "site-packages", "__pycache__", "build", "dist", "venv", "env"}


class Refused(Exception):
    """What cannot be done, and what to do instead. Nothing was written."""


@dataclass(slots=True)
class Record:
    """`packages`: folder that got modules -> {"patterns": ids, "files": {path: {"from": …, "sha256": …}}}"""

    version: str = ""
    packages: dict[str, dict[str, Any]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # found under another name; recorded by the next write

    @classmethod
    def read(cls, root: Path) -> Record:
        """The project's record; empty if nothing was copied."""
        path = root / LOCK
        try:
            stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            record = cls(stored.get("queuesmith", ""), stored.get("packages", {}))
            for entry in record.packages.values():
                for file in (*entry["files"].values(), {"from": "", "sha256": ""}):
                    _ = entry["patterns"], file["from"], file["sha256"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refused(
                f"{path} is damaged ({error}); restore it from git, or delete it and run queuesmith adopt"
            ) from None
        record._follow(root)
        return record

    def entry(self, into: str) -> dict[str, Any]:
        return self.packages.setdefault(into, {"patterns": [], "files": {}})

    def text(self) -> str:
        for entry in self.packages.values():
            entry["files"] = dict(sorted(entry["files"].items()))
        return json.dumps({"queuesmith": catalogue.version(), "packages": self.packages}, indent=2) + "\n"

    def gone(self, root: Path) -> dict[str, int]:
        """Folders with no module left -> how many there were."""
        result = {}
        for into, entry in self.packages.items():
            modules = _modules(entry)
            if modules and not any((root / path).is_file() for path in modules):
                result[into] = len(modules)
        return result

    def _follow(self, root: Path) -> None:
        """A renamed package took its modules along: find them by their names."""
        for into in self.gone(root):
            entry = self.packages[into]
            names = set(_modules(entry).values())
            there = [
                (sum((folder / name).is_file() for name in names), folder)
                for folder in folders(root)
                if folder.name == "patterns"
            ]
            most, folder = max(there, key=lambda pair: pair[0], default=(0, root / "patterns"))
            new = folder.parent.relative_to(root).as_posix()
            if most * 2 < len(names) or new in self.packages:
                continue
            old = PurePosixPath(into, "patterns").as_posix() + "/"
            entry["files"] = {
                PurePosixPath(new, "patterns", path.removeprefix(old)).as_posix()
                if path.startswith(old)
                else path: file
                for path, file in entry["files"].items()
            }
            entry.pop("prefix", None)
            self.packages[new] = self.packages.pop(into)
            self.renamed[into] = new


def _modules(entry: dict[str, Any]) -> dict[str, str]:
    """Path -> module, of an entry's files."""
    files = entry["files"].items()
    return {path: module_name(file["from"]) for path, file in files if file["from"].startswith(OURS)}


def module_name(origin: str) -> str:
    """`reference/studyhall/patterns/core/errors.py` -> `core/errors.py`"""
    return origin.removeprefix(f"{OURS}/")


def folders(root: Path) -> Iterator[Path]:
    """Every folder that may hold the project's own code."""
    for path, names, _ in os.walk(root):
        names[:] = sorted(n for n in names if n[0] != "." and n not in NOT_OURS)
        names[:] = [n for n in names if not Path(path, n, "pyvenv.cfg").is_file()]
        yield Path(path)


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
