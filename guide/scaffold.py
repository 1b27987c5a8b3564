"""What the templates know about the patterns: `templates/catalogue.yml`, read by copier.yml, written by `make sync`."""

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import PurePosixPath

from alembic.autogenerate import render_python_code
from alembic.operations.ops import CreateIndexOp, CreateTableOp, UpgradeOps

from queuesmith import catalogue
from studyhall.patterns.core.store import metadata

PATH = catalogue.ROOT / "templates" / "catalogue.yml"

# What the code of each template imports; everything else in a project was chosen.
_SHARED = [
    "core/clock.py",
    "core/connections.py",
    "core/open_store.py",
    "engine/server.py",
    "health/exposition.py",
    "health/senders.py",
    "idempotency/markers.py",
    "observability/lines.py",
    "parent_death.py",
    "shutdown.py",
]
_JOBS = [
    *_SHARED,
    "bullmq_worker/worker.py",
    "dead_letter/sweeper.py",
    "deadline.py",
    "idempotency/once.py",
    "pipeline.py",
    "producer.py",
    "signed_payload.py",
    "stall_budget.py",
    "typed_jobs.py",
]
CORE = {
    "background-jobs": _JOBS,
    "async-flow": [*_JOBS, "progress.py", "progress_stream.py"],
    "event-driven": [
        *_SHARED,
        "event_bus/redis_streams.py",
        "event_schema.py",
        "inbox.py",
        "outbox/relay.py",
        "replay.py",
        "saga/runner.py",
    ],
}
BROKERS = {
    "redis": "event_bus/redis_streams.py",
    "rabbitmq": "event_bus/rabbitmq.py",
    "nats": "event_bus/nats.py",
    "kafka": "event_bus/kafka.py",
}
APP = ["alembic", "fastapi", "uvicorn"]  # what the generated code itself imports besides
DEV = ["pytest", "pytest-asyncio", "pytest-timeout", "ruff", "mypy", "httpx2"]

HEAD = """\
# Made by `make sync` from the pages of the patterns, their modules and pyproject.toml. Not a question: copier.yml asks
# from it which patterns there are, which modules each one needs and which packages those import.
"""


def rendered() -> str:
    patterns = catalogue.patterns()
    # What the first revision can make: templates/common/migrations/first.py.
    used = {*catalogue.closure([module for own in CORE.values() for module in own]), *patterns["schedule"].modules}
    facts = {
        "version": catalogue.version(),
        "modules": _modules(),  # the others name them by their place here
        "core": {kind: _places(catalogue.closure(own)) for kind, own in CORE.items()},
        "brokers": {broker: _places(catalogue.closure([own])) for broker, own in BROKERS.items()},
        "patterns": {ident: _choice(pattern) for ident, pattern in sorted(patterns.items())} | _parts(),
        "packages": _packages(),
        "tables": {name: made for name in sorted(used) if (made := _tables(name))},
        "app": catalogue.packages([], also=APP),
        "dev": catalogue.packages([], also=DEV),
        "postgres": catalogue.packages([], also=["psycopg"]),
    }
    # JSON is YAML; one line per entry so that a change is readable.
    body = ",\n".join(f"    {json.dumps(key)}: {_entry(value)}" for key, value in facts.items())
    return f"{HEAD}catalogue:\n  type: yaml\n  when: false\n  default: {{\n{body}\n  }}\n"


@cache
def _modules() -> list[str]:
    return sorted(path.relative_to(catalogue.MODULES).as_posix() for path in catalogue.MODULES.rglob("*.py"))


def _places(modules: Sequence[str]) -> list[int]:
    return [_modules().index(module) for module in modules]


def _packages() -> dict[str, list[int]]:
    """Each package, and the places of the modules that import it."""
    places: dict[str, list[int]] = {}
    for place, module in enumerate(_modules()):
        for package in catalogue.packages([module]):
            places.setdefault(package, []).append(place)
    return dict(sorted(places.items()))


def _tables(module: str) -> str:
    """What the first revision of a service that uses this module does for its tables (migrations/first.py)."""
    if all(module not in catalogue.closure(own) for own in (*CORE.values(), catalogue.find("schedule").modules)):
        return ""
    text = (catalogue.MODULES / module).read_text(encoding="utf-8")
    steps: list[str] = []
    for name in re.findall(r'= Table\(\s*"(\w+)"', text):
        import_module(f"studyhall.patterns.{module.removesuffix('.py').replace('/', '.')}")
        table = metadata.tables[name]
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        made = UpgradeOps([CreateTableOp.from_table(table), *map(CreateIndexOp.from_index, indexes)])
        steps += [line.strip() for line in render_python_code(made).splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(steps)


def _choice(pattern: catalogue.Pattern) -> dict[str, object]:
    return {"title": pattern.title, "own": _modules().index(pattern.own[0]), "modules": _places(pattern.modules)}


def _parts() -> dict[str, dict[str, object]]:
    """Parts are chosen by themselves: `observability.metrics`."""
    choices = {}
    for pattern in catalogue.patterns().values():
        for module in pattern.parts:
            part = catalogue.find(f"{pattern.id}.{PurePosixPath(module).stem}")
            title = f"{pattern.title}: {PurePosixPath(module).stem}"
            choices[part.id] = {**_choice(part), "title": title, "own": _modules().index(module)}
    return dict(sorted(choices.items()))


def _entry(value: object) -> str:
    if not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    inner = ",\n".join(
        f"    {json.dumps(key)}:{json.dumps(entry, separators=(',', ':'))}" for key, entry in value.items()
    )
    return f"{{\n{inner}\n    }}"
