"""No name that a user may choose collides with one that the code around it needs."""

import ast
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from studyhall.patterns.typed_jobs import Payload

ROOT = Path(__file__).resolve().parents[2]
Render = Callable[..., Path]
RESERVED = {
    name: set(words.split())
    for name, words in yaml.safe_load((ROOT / "templates/names.yml").read_text())["reserved"]["default"].items()
}
MARK = "qqzz"  # what the user names here; no identifier of ours contains it


def identifiers(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        yield from (name for name in names if MARK not in name.lower())


def as_words(name):
    """`JobTypes` -> `job_types`: the job of which the template makes this class."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def is_class(name):
    return name[0].isupper() and "".join(word.capitalize() for word in as_words(name).split("_")) == name


def plural(word):
    """As copier.yml makes it."""
    if word[-1] in "sxz":
        return f"{word}es"
    return f"{word[:-1]}ies" if word[-1] == "y" and word[-2:-1] not in tuple("aeou") else f"{word}s"


@pytest.mark.parametrize("kind", ["background-jobs", "async-flow"])
def test_no_job_can_take_a_name_that_its_module_uses(render, kind):
    fields = f"{MARK}: str, {MARK}2: int"
    package = render(kind=kind, job=MARK, fields=fields, patterns=["schedule"]) / "src" / "my_service"
    jobs, api = set(identifiers(package / "jobs.py")), set(identifiers(package / "api.py"))
    taken = {name for name in jobs if name.islower()} | {as_words(name) for name in jobs | api if is_class(name)}
    assert len(taken) > 20
    assert taken <= RESERVED["jobs"] | RESERVED["keywords"] | RESERVED["fields"] | {"annotations"}


def test_no_event_can_take_a_name_that_its_modules_use(render):
    fields = f"{MARK}: str, {MARK}2: int"
    package = render(kind="event-driven", event=f"{MARK}.{MARK}ed", fields=fields) / "src" / "my_service"
    files = ("api", "consumers", "events", "processing")
    used = {name for file in files for name in identifiers(package / f"{file}.py")}
    taken = {as_words(name) for name in used if is_class(name)}
    # The table is the plural of the thing: `type.changed` would make a table called `types`.
    tables = {name for file in ("api", "db", "processing") for name in identifiers(package / f"{file}.py")}
    guesses = {guess for name in tables for guess in (name[:-1], name[:-2], f"{name[:-3]}y")}
    taken |= {guess for guess in guesses if guess and plural(guess) in tables}
    possible = {name for name in taken if re.fullmatch(r"[a-z][a-z0-9]+(_[a-z][a-z0-9]+)?", name)}
    assert len(possible) > 20
    assert sorted(possible - RESERVED["events"] - RESERVED["fields"]) == []


def test_no_field_can_take_a_name_of_the_model_or_of_a_column():
    taken = {name for model in (BaseModel, Payload) for name in dir(model)}
    taken = {name for name in taken if not name.startswith(("_", "model_"))}
    assert taken | {"str", "int", "float", "bool"} <= RESERVED["fields"]
    for file in (ROOT / "templates").rglob("db.py*"):
        assert set(re.findall(r'Column\("(\w+)"', file.read_text())) - {"subject", "text"} <= RESERVED["fields"]


def test_no_package_can_hide_a_module_that_the_project_imports():
    assert {name for name in sys.stdlib_module_names if not name.startswith("_")} - {"this"} <= RESERVED["modules"]
    # `python -m test` is Python's own test suite; build and dist are ignored by git; src is where packages lie.
    assert {"test", "tests", "src", "build", "dist", "conftest", "setup"} <= RESERVED["modules"]


def test_no_project_can_be_called_like_a_package_that_it_needs():
    """As a distribution: `aio-pika`. Their own dependencies are looked up in this environment."""
    known = yaml.safe_load((ROOT / "templates/catalogue.yml").read_text())["catalogue"]["default"]
    waiting = {Requirement(item) for item in [*known["packages"], *known["app"], *known["dev"], *known["postgres"]]}
    needed = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        needed.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            for line in metadata.requires(name) or ():
                other = Requirement(line)
                extras = [{"extra": extra} for extra in wanted.extras] or [{"extra": ""}]
                applies = other.marker is None or any(other.marker.evaluate(each) for each in extras)
                if applies and canonicalize_name(other.name) not in needed:
                    waiting.add(other)
    assert len(needed) > 40
    assert sorted(needed - RESERVED["distributions"]) == []


@pytest.mark.full
def test_no_package_can_hide_one_of_the_installed_packages(render, tmp_path):
    environment = tmp_path / "venv"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, environment], check=True)
    for broker in ("rabbitmq", "nats", "kafka"):
        project = render(broker, kind="event-driven", broker=broker, database="postgres", patterns=["fan-out"])
        install = [uv, "pip", "install", "-q", "--python", environment / "bin" / "python"]
        subprocess.run([*install, "-r", project / "pyproject.toml", "--extra", "dev"], check=True)
    modules = {
        path.name.removesuffix(".py")
        for path in next((environment / "lib").glob("python3*/site-packages")).iterdir()
        if re.fullmatch(r"[a-z]\w*(\.py)?", path.name)
    }
    assert {"uvicorn", "nats", "aio_pika", "psycopg"} <= modules
    assert modules - RESERVED["modules"] - {"node_modules"} == set()
