"""Recipes: small, complete services, each with the modules it needs and its fault proof, adapted to a user's case.

A recipe is a folder in reference/recipes: flat files that import `patterns` and each other, and `recipe.toml`. It runs
as it is; adapting it changes the queue's name and the fields of `class Task`, of which the first is the key. So its
code names only the key; the others appear as examples, in exactly the forms that `_examples` makes.
"""

import ast
import keyword
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .adopt import Adoption, plan
from .catalogue import ROOT
from .project import Project
from .record import Refused

FOLDER = ROOT / "reference" / "recipes"
_VALUES = {"str": "text", "int": "1", "float": "1.5", "bool": "true"}
# Arguments of submit.py, and what every pydantic model has.
_TAKEN = ("keys", "unreadable", "help", "copy", "json", "dict", "schema", "validate", "construct", "file")


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: str

    @property
    def value(self) -> str:
        """An example, as it is typed in a shell."""
        return _VALUES[self.type]

    @property
    def literal(self) -> str:
        """An example, as TOML and JSON write it."""
        return f'"{self.value}"' if self.type == "str" else self.value


@dataclass(frozen=True, slots=True)
class Recipe:
    id: str
    title: str
    summary: str
    skill: str
    queue: str
    fields: tuple[Field, ...]
    patterns: tuple[str, ...]
    packages: tuple[str, ...]
    env: Mapping[str, str]  # what its worker needs besides REDIS_URL and DATABASE_URL

    @property
    def folder(self) -> Path:
        return FOLDER / self.id

    @property
    def page(self) -> str:
        return f"skills/{self.skill}/references/recipes/{self.id}.md"

    @property
    def files(self) -> dict[str, str]:
        """Name -> text, of what is written; the rest is for tests and tools."""
        files = sorted(path for path in self.folder.iterdir() if path.is_file())
        return {path.name: path.read_text(encoding="utf-8") for path in files if path.name != "recipe.toml"}


def recipes() -> dict[str, Recipe]:
    known = {}
    for file in sorted(FOLDER.glob("*/recipe.toml")):
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        fields, patterns = parse_fields(content.pop("fields")), tuple(content.pop("patterns"))
        packages, env = tuple(content.pop("packages", ())), content.pop("env", {})
        known[file.parent.name] = Recipe(
            id=file.parent.name, fields=fields, patterns=patterns, packages=packages, env=env, **content
        )
    return known


def find(name: str) -> Recipe:
    if recipe := (known := recipes()).get(name.replace("_", "-").lower()):
        return recipe
    raise Refused(f"there is no recipe {name!r}; there are {', '.join(known)}")


def parse_fields(text: str) -> tuple[Field, ...]:
    """`parcel: str, grams: int`"""
    example = "write name: type pairs (str, int, float, bool), the key first: --fields 'parcel: str, grams: int'"
    parsed = []
    for part in text.split(","):
        pair = re.fullmatch(r"\s*([a-z][A-Za-z0-9_]{0,29})\s*:\s*(str|int|float|bool)\s*", part)
        if not pair:
            raise Refused(f"--fields: cannot read {part.strip()!r}; {example}")
        if keyword.iskeyword(pair[1]) or pair[1] in _TAKEN or pair[1].startswith("model_"):
            raise Refused(f"--fields: {pair[1]} is taken by Python or by the code around it; choose another name")
        parsed.append(Field(pair[1], pair[2]))
    if len({field.name.lower() for field in parsed}) < len(parsed):
        raise Refused(f"--fields: {text!r} names a field twice")
    if parsed[0].type not in ("str", "int"):
        raise Refused(f"--fields: the first field, {parsed[0].name}, is the key: it is a str or an int")
    return tuple(parsed)


def planned(recipe: Recipe, project: Project, *, queue: str | None = None, fields: str | None = None) -> Adoption:
    """What `queuesmith start` would write. A folder below one that has modules uses those."""
    home = project.with_modules()
    own = render(
        recipe,
        queue=recipe.queue if queue is None else queue,
        fields=recipe.fields if fields is None else parse_fields(fields),
        project=project,
        modules=home.package,
    )
    if project.prefix and not (project.root / project.into).exists():
        own[project.path("__init__.py")] = ""
    return plan(home, recipe.patterns, with_proofs=False, own=own, also=recipe.packages)


def named(project: Project) -> str:
    """What tells the service from others in the same project: the name of its folder."""
    below = project.with_modules() != project or "." in project.prefix
    return project.prefix.split(".")[-1] if below else ""


def files_of(project: Project) -> tuple[str, str]:
    """Its test and its prove file, from the root."""
    if not project.prefix:
        return project.path("test_service.py"), project.path("prove.toml")
    name = named(project)
    return f"tests/test_{name or 'service'}.py", f"prove-{name}.toml" if name else "prove.toml"


def render(recipe: Recipe, *, queue: str, fields: tuple[Field, ...], project: Project, modules: str) -> dict[str, str]:
    """Path from the project's root -> text. `modules`: the name that the patterns are imported by."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", queue):
        raise Refused(f"--queue {queue!r}: letters, digits, dot, dash and underscore; a colon separates Redis' keys")
    siblings = [name.removesuffix(".py") for name in recipe.files if name.endswith(".py")]
    test, proof = files_of(project)
    places = {"test_service.py": test, "prove.toml": proof}
    rendered = {}
    for name, source_text in recipe.files.items():
        code = name.endswith((".py", ".toml"))
        text = _filled(recipe, source_text, queue, fields) if code else source_text
        path = project.path(name)
        if project.prefix:
            text = _told_apart(text, named(project))
            text = _in_package(text, project.prefix, project.into, siblings, modules)
            text = re.sub(r"\bpytest test_service\.py\b", f"pytest {test}", text)
            # Other files belong in the root, where everything is run.
            path = places.get(name) or (path if name.endswith(".py") else name)
        rendered[path] = text
    return rendered


def _filled(recipe: Recipe, text: str, queue: str, fields: tuple[Field, ...]) -> str:
    # The key first: the other fields may have its old name.
    text = re.sub(rf"\b{recipe.fields[0].name}\b", fields[0].name, text)
    text = re.sub(rf"\b{recipe.fields[0].name.upper()}\b", fields[0].name.upper(), text)
    for old, new in zip(_examples(recipe.fields[1:]), _examples(fields[1:]), strict=True):
        text = text.replace(old, new) if old else text
    if "class Task(" in text:
        text = _with_fields(text, fields)
    text = re.sub(rf'^((?:QUEUE|queue) = )"{re.escape(recipe.queue)}"', rf'\1"{queue}"', text, flags=re.MULTILINE)
    if fields[0].type == "int" and not re.search(r"^keys = ", text, flags=re.MULTILINE):
        text = re.sub(r"^\[service\]$", '[service]\nkeys = "number"', text, flags=re.MULTILINE)
    return text


def _with_fields(text: str, fields: tuple[Field, ...]) -> str:
    """The annotated lines of `class Task` replaced."""
    task = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Task")
    old = [node for node in task.body if isinstance(node, ast.AnnAssign)]
    lines = text.splitlines()
    lines[old[0].lineno - 1 : old[-1].end_lineno] = [f"    {field.name}: {field.type}" for field in fields]
    return "\n".join(lines) + "\n"


def _examples(fields: tuple[Field, ...]) -> list[str]:
    """Values of the fields after the key: on a command line, as arguments in Python, in TOML, in JSON."""
    return [
        "".join(f" --{field.name} {field.value}" for field in fields),
        "".join(f", {field.name}={field.literal.replace('true', 'True')}" for field in fields),
        "".join(f", {field.name} = {field.literal}" for field in fields),
        "".join(f', "{field.name}": {field.literal}' for field in fields),
    ]


def _told_apart(text: str, name: str) -> str:
    """Tables, calls and the schedule under the service's own name: it may share its database with others."""
    if not name:
        return text
    text = re.sub(r'(?<=from )(results|imported)\b|(?<=")(results|imported)(?=")', rf"{name}_\1\2", text)
    text = text.replace('Schedule("nightly"', f'Schedule("{name.lower().replace("_", "-")}"')
    return text.replace('"provider",', f'"{name}",')


def _in_package(text: str, prefix: str, source: str, siblings: list[str], modules: str) -> str:
    names = "|".join(siblings)
    text = re.sub(rf"^(\s*)from ({names})\b", rf"\1from {prefix}.\2", text, flags=re.MULTILINE)
    text = re.sub(r"^(\s*)from patterns\b", rf"\1from {modules}", text, flags=re.MULTILINE)
    text = re.sub(rf"\bpython ({names})\.py\b", rf"python -m {prefix}.\1", text)
    text = re.sub(r"\bpython -m patterns\b", rf"python -m {modules}", text)
    text = re.sub(rf'\["({names})\.py"\]', rf'["-m", "{prefix}.\1"]', text)
    text = text.replace("Path(__file__).parent", "Path(__file__).parents[1]")
    if top := top_of(source, prefix):
        text = re.sub(r"^\[service\.env\]$", f'[service.env]\nPYTHONPATH = "{top}"', text, flags=re.MULTILINE)
    return text


def top_of(source: str, prefix: str) -> str:
    """The folder to import from: `src` of `src/app`, nothing where it is the root."""
    return source.removesuffix(prefix.replace(".", "/")).rstrip("/").removesuffix(".") if prefix else ""
