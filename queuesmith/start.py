"""The command start: a recipe into a folder, and what to type next."""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from .adopt import Adoption
from .catalogue import ROOT
from .copying import installs, print_json, put
from .project import Project
from .recipes import Recipe, files_of, find, parse_fields, planned, recipes, top_of

SERVER = "redis://127.0.0.1:6379"
OURS = "# Written by `queuesmith start`; yours to edit."


def program() -> str:
    """What to type for this command: from a plugin or a checkout it is not on PATH."""
    return "queuesmith" if shutil.which("queuesmith") else shlex.quote(sys.argv[0])


def start(options: argparse.Namespace) -> int:
    if options.recipe is None or options.list:
        return _list(options)
    recipe = find(options.recipe)
    project = Project.find(options.into)
    adoption = planned(recipe, project, queue=options.queue, fields=options.fields)
    written = [] if options.dry_run else put(options, adoption)
    if options.json:
        files = {change.path: change.state for change in adoption.changes}
        paths = [change.path for change in written] + ([] if options.dry_run else _list_packages(adoption))
        then = {"install": _install(adoption), "next": _next(recipe, project)}
        print_json({"recipe": recipe.id, "root": str(adoption.project.root), "files": files, "written": paths, **then})
        return 0
    _say(options, adoption, [change.path for change in written])
    for path in [] if options.dry_run else _list_packages(adoption):
        print(f"\n{path} lists them, with versions.")
    where = "" if project.root == Path.cwd().resolve() else f", in {os.path.relpath(project.root)}"
    print(f"\n{_key(recipe, options.fields)}\n\nThen{where}:")
    print("\n".join(f"  {command}" for command in _next(recipe, project)))
    print(f"\nWhat it survives, what to change: {ROOT / recipe.page}")
    return 0


def _key(recipe: Recipe, fields: str | None) -> str:
    first = (parse_fields(fields) if fields else recipe.fields)[0].name
    other = ", or what `key_of` in jobs.py returns" if "def key_of" in recipe.files["jobs.py"] else ""
    return f"Key: {first}, the first field{other}. The same key again is a duplicate."


def _say(options: argparse.Namespace, adoption: Adoption, written: list[str]) -> None:
    modules = f"{adoption.project.modules}/"
    for change in adoption.changes:
        if change.path.startswith(modules) and change.state in ("new", "same"):
            continue  # 50 lines that say nothing
        done = options.dry_run or change.path in written or change.state == "same"
        print(f"  {change.state if done else 'kept':<11} {change.path}")
        if options.dry_run and change.state in ("updated", "edited"):
            print(change.diff())
    count = sum(change.path.startswith(modules) for change in adoption.changes)
    print(f"  and {count} modules in {modules}")
    print("Nothing was written." if options.dry_run else f"{len(written)} files written.")
    print("\nInstall:\n  " + "\n  or: ".join(_install(adoption)))
    if adoption.on_request:
        print("For PostgreSQL also:\n  " + "\n  or: ".join(installs(adoption.project, adoption.on_request)))


def _needed(adoption: Adoption) -> list[str]:
    needed = {*adoption.requirements, *adoption.test_requirements}
    # No recipe's test is a coroutine, and pytest-asyncio warns about its settings.
    return sorted(package for package in needed if not package.startswith("pytest-asyncio"))


def _install(adoption: Adoption) -> list[str]:
    return installs(adoption.project, _needed(adoption))


def _list_packages(adoption: Adoption) -> list[str]:
    """Into requirements.txt, unless the project keeps its own list; the files that were written."""
    root = adoption.project.root
    path = root / "requirements.txt"
    lines = path.read_text().splitlines() if path.exists() else [OURS]
    if lines[:1] != [OURS] or any((root / name).exists() for name in ("pyproject.toml", "setup.py", "Pipfile")):
        return []
    path.write_text("\n".join([*lines, *(package for package in _needed(adoption) if package not in lines)]) + "\n")
    return [path.name]


def _next(recipe: Recipe, project: Project) -> list[str]:
    path, run = "", "python {}.py"
    test, proof = files_of(project)
    if project.prefix:
        top = top_of(project.into, project.prefix)
        path = f"PYTHONPATH={top} " if top else ""
        run = f"python -m {project.prefix}.{{}}"
    variables = {"REDIS_URL": SERVER, "DATABASE_URL": "sqlite:///service.db", **recipe.env}
    if not any("REDIS_URL" in text for text in recipe.files.values()):
        del variables["REDIS_URL"]
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    api = [f"{env} {path}{run.format('api')} 8000"] if "api.py" in recipe.files else []
    return [
        f"{path}python -m pytest -q {test}",
        *api,
        f"{env} {path}{run.format('worker')}",
        f"{program()} prove {'' if proof == 'prove.toml' else f'{proof} '}--quick",
    ]


def _list(options: argparse.Namespace) -> int:
    known = list(recipes().values())
    if options.json:
        print_json(
            [
                {"id": recipe.id, "title": recipe.title, "summary": recipe.summary, "skill": recipe.skill}
                for recipe in known
            ]
        )
        return 0
    width = max((len(recipe.id) for recipe in known), default=0)
    for recipe in known:
        print(f"  {recipe.id:<{width}}  {recipe.title}. {recipe.summary}")
    print("\nqueuesmith start paid-call --into . --queue labels --fields 'parcel: str, grams: int'")
    return 0
