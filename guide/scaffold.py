"""What the templates know about the patterns: `templates/catalogue.yml`, read by copier.yml, written by `make sync`."""

from __future__ import annotations

import json

from queuesmith import catalogue

PATH = catalogue.ROOT / "templates" / "catalogue.yml"

# Of the parts of a pattern, what the code of every template imports too.
PARTS = ["observability/metrics.py"]
BROKERS = {
    "redis": "event_bus/redis_streams.py",
    "rabbitmq": "event_bus/rabbitmq.py",
    "nats": "event_bus/nats.py",
    "kafka": "event_bus/kafka.py",
}
APP = ["fastapi", "uvicorn"]  # what the generated code itself imports besides
DEV = ["pytest", "pytest-asyncio", "pytest-timeout", "ruff", "mypy", "httpx2"]

HEAD = """\
# Made by `make sync` from the pages of the patterns, their modules and pyproject.toml. Not a question: copier.yml asks
# from it which patterns there are, which modules each one needs and which packages those import.
"""


def rendered() -> str:
    patterns = catalogue.patterns()
    modules = sorted(
        path.relative_to(catalogue.MODULES).as_posix() for path in catalogue.MODULES.rglob("*.py")
    )
    core = {
        kind: [name for one in patterns.values() if kind in one.templates for name in one.own]
        for kind in catalogue.SKILLS
    }
    facts = {
        "version": catalogue.version(),
        "core": {kind: catalogue.closure([*own, *PARTS]) for kind, own in core.items()},
        "brokers": {broker: catalogue.closure([own]) for broker, own in BROKERS.items()},
        "patterns": {
            ident: {"title": one.title, "skill": one.skill, "own": list(one.own), "modules": one.modules}
            for ident, one in sorted(patterns.items())
        },
        "packages": {name: catalogue.packages([name]) for name in modules},
        "app": catalogue.packages([], also=APP),
        "dev": catalogue.packages([], also=DEV),
        "postgres": catalogue.packages([], postgres=True),
    }
    # JSON is YAML; one line per entry so that a change is readable.
    body = ",\n".join(f"    {json.dumps(key)}: {_entry(value)}" for key, value in facts.items())
    return f"{HEAD}catalogue:\n  type: yaml\n  when: false\n  default: {{\n{body}\n  }}\n"


def _entry(value: object) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = ",\n".join(f"      {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items())
    return f"{{\n{inner}\n    }}"
