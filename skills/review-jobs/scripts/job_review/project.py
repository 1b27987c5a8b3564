"""What was read: files per language, libraries recognised and not, versions. Known before any file is judged."""

import ast
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .text import masked

SKIPPED = {
    ".git",
    "node_modules",
    ".venv",
    "venv",
    "env",
    "dist",
    "build",
    "__pycache__",
    "site-packages",
    ".tox",
    "vendor",
}
TESTS = re.compile(
    r"(^|/)(tests?|__tests__|specs?|e2e)(/|$)|(^|/)(test_[^/]*|[^/]*[._]((client|server|unit)?test|spec))\.\w+$"
)
# Not to be fixed here: https://go.dev/s/generatedcode, and similar marks.
GENERATED = re.compile(r"^(?://|#) Code generated .* DO NOT EDIT\.$", re.MULTILINE)
SCRIPTS = {".ts", ".tsx", ".mts", ".cts", ".js", ".jsx", ".mjs", ".cjs"}
LANGUAGES = {".py": "Python", ".go": "Go"} | dict.fromkeys(SCRIPTS, "TypeScript/JavaScript")
# Languages that queues are used from and that nothing here reads.
UNREAD = {
    ".rb": "Ruby",
    ".java": "Java",
    ".kt": "Kotlin",
    ".scala": "Scala",
    ".cs": "C#",
    ".php": "PHP",
    ".ex": "Elixir",
    ".exs": "Elixir",
    ".rs": "Rust",
    ".cpp": "C++",
    ".swift": "Swift",
    ".vue": "Vue",
    ".svelte": "Svelte",
    ".ipynb": "notebooks",
}

# name: (Python modules, npm packages, Go modules). The first table has its own rules, the second only the general ones.
JUDGED: dict[str, tuple[str, str, str]] = {
    "BullMQ": ("bullmq", "bullmq|@nestjs/bullmq", ""),
    "Celery": ("celery", "", ""),
    "asynq": ("", "", "github.com/hibiken/asynq"),
    "Kafka": (
        "kafka|aiokafka|confluent_kafka",
        "kafkajs|node-rdkafka|@confluentinc/kafka-javascript",
        "github.com/segmentio/kafka-go|github.com/confluentinc/confluent-kafka-go|github.com/IBM/sarama",
    ),
    "RabbitMQ": (
        r"pika|aio_pika|kombu(?!\.serialization)",
        "amqplib|amqp-connection-manager",
        "github.com/rabbitmq/amqp091-go",
    ),
    "APScheduler": ("apscheduler", "", ""),
    "schedule": ("schedule", "", ""),
    "node-cron": ("", "node-cron|cron|node-schedule|croner|@nestjs/schedule", ""),
    "robfig/cron": ("", "", "github.com/robfig/cron|github.com/go-co-op/gocron"),
}
GENERAL: dict[str, tuple[str, str, str]] = {
    "RQ": ("rq", "", ""),
    "dramatiq": ("dramatiq", "", ""),
    "arq": ("arq", "", ""),
    "taskiq": ("taskiq", "", ""),
    "Huey": ("huey", "", ""),
    "SAQ": ("saq", "", ""),
    "procrastinate": ("procrastinate", "", ""),
    "FastStream": ("faststream", "", ""),
    "Temporal": ("temporalio", "@temporalio/worker|@temporalio/client", "go.temporal.io/sdk"),
    "Bull": ("", "bull|@nestjs/bull", ""),
    "Agenda": ("", "agenda", ""),
    "pg-boss": ("", "pg-boss", ""),
    "graphile-worker": ("", "graphile-worker", ""),
    "bee-queue": ("", "bee-queue", ""),
    "River": ("", "", "github.com/riverqueue/river"),
    "machinery": ("", "", "github.com/RichardKnop/machinery"),
    "Watermill": ("", "", "github.com/ThreeDotsLabs/watermill"),
    "NATS": ("nats", "nats|@nats-io/jetstream", "github.com/nats-io/nats.go"),
    "SQS": ("aioboto3", "@aws-sdk/client-sqs|sqs-consumer", "github.com/aws/aws-sdk-go-v2/service/sqs"),
}
STREAMS = re.compile(r"\.(xreadgroup|xadd)\(", re.IGNORECASE)
QUEUE_LIKE = re.compile(
    r"queue|celery|sidekiq|cron|\bjobs?\b|\btasks?\b|kafka|rabbit|amqp|pubsub|schedul", re.IGNORECASE
)


def frameworks_in(text: str, language: str) -> set[str]:
    column = ("Python", "TypeScript/JavaScript", "Go").index(language)
    libraries = set()
    for name, modules in (JUDGED | GENERAL).items():
        names = modules[column]
        if names and re.search(_IMPORT[column].format(names), text, re.MULTILINE):
            libraries.add(name)
    if STREAMS.search(text):
        libraries.add("Redis Streams")
    if column == 0 and re.search(r"(client|resource)\(\s*['\"]sqs['\"]", text):
        libraries.add("SQS")
    return libraries


_IMPORT = (
    r"^\s*(?:from|import)\s+(?:{})\b(?!\s*=)",
    r"(?:from\s+|require\(\s*|import\s+|import\(\s*)['\"](?:{})(?:/[^'\"]*)?['\"]",
    r"\"(?:{})[\w./-]*\"",
)


@dataclass
class Read:
    """What a report says besides its findings."""

    files: dict[str, int] = field(default_factory=dict)
    frameworks: dict[str, int] = field(default_factory=dict)
    general_only: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    not_recognised: list[str] = field(default_factory=list)
    not_read: dict[str, int] = field(default_factory=dict)
    not_parsed: list[str] = field(default_factory=list)

    def warnings(self) -> list[str]:
        """Why few findings may mean little."""
        notes = []
        if not self.files:
            notes.append("no file was read: nothing is known about this code")
        elif not self.frameworks:
            notes.append("no queue, broker or scheduler was recognised in what was read: 0 findings say nothing here")
        if self.not_read:
            notes.append("not read: " + ", ".join(f"{count} {name}" for name, count in self.not_read.items()))
        if self.not_parsed:
            notes.append("could not be parsed: " + ", ".join(self.not_parsed))
        if self.general_only:
            notes.append("only the general rules apply to: " + ", ".join(self.general_only))
        if self.not_recognised:
            notes.append("required and unknown here: " + ", ".join(self.not_recognised))
        return notes


class Project:
    def __init__(self, paths: Iterable[Path], include_tests: bool = False) -> None:
        paths = list(paths)
        unread: Counter[str] = Counter()
        files = list(_files_in(paths, include_tests, unread))
        texts = {
            path: text for path in files if not GENERATED.search((text := path.read_text(errors="replace"))[:2000])
        }
        self.python = {path: text for path, text in texts.items() if path.suffix == ".py"}
        self.scripts = {path: masked(text) for path, text in texts.items() if path.suffix in SCRIPTS}
        self.go = {path: masked(text) for path, text in texts.items() if path.suffix == ".go"}
        everything = "\n".join(self.python.values())
        self.python_stops = re.search(r"add_signal_handler|signal\.signal\(|run_until_signalled", everything)
        self.scripts_stop = any(
            re.search(r"onShutdown|onModuleDestroy|[oO]nApplicationShutdown|createTerminus", text)
            or ("SIGTERM" in text and re.search(r"process\.(on|once)\(", text))
            for text in self.scripts.values()
        )
        # A queue made in another file may have them.
        self.default_options = any("defaultJobOptions" in text for text in self.scripts.values())
        self.acks_late = "acks_late" in everything
        self.manifests = Manifests(paths)
        # Before version 8 redis-py had no default socket timeout.
        self.old_redis = any(int(version.split(".")[0]) < 8 for version in self.manifests.of("Python", "redis"))
        self.uses = {
            path: frameworks_in(text, LANGUAGES[path.suffix])
            for path, text in [*self.python.items(), *self.scripts.items(), *self.go.items()]
        }
        self.read = self._read(unread)

    def bullmq_major(self, path: Path) -> int | None:
        """Of the manifest nearest to the file; None: unknown."""
        version = self.manifests.nearest(path, LANGUAGES[path.suffix], "bullmq")
        return int(version.split(".")[0]) if version else None

    def _read(self, unread: Counter[str]) -> Read:
        used = Counter(name for names in self.uses.values() for name in names)
        versions = {
            f"bullmq ({language})": ", ".join(pinned)
            for language in ("Python", "TypeScript/JavaScript")
            if (pinned := sorted(set(self.manifests.of(language, "bullmq"))))
        }
        known = "|".join(names for row in (JUDGED | GENERAL).values() for names in row if names)
        return Read(
            files=dict(Counter(LANGUAGES[path.suffix] for path in self.uses)),
            frameworks=dict(sorted(used.items())),
            general_only=sorted(set(used) & set(GENERAL)),
            versions=versions,
            not_recognised=sorted(
                name
                for name in self.manifests.names
                if QUEUE_LIKE.search(name)
                and not re.search(rf"^(?:{known})\b", name.replace("_", "-"))
                and not re.search(rf"^(?:{known})\b", name.replace("-", "_"))
            ),
            not_read=dict(unread),
            not_parsed=[str(path) for path, text in self.python.items() if not _parses(text)],
        )


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _files_in(paths: Iterable[Path], include_tests: bool, unread: Counter[str]) -> Iterator[Path]:
    for path in paths:
        for file in [path] if path.is_file() else _walk(path):
            inside = file.relative_to(path) if path.is_dir() else Path(file.name)
            if file.name.endswith((".d.ts", ".min.js", ".pb.go")):
                continue
            if path.is_dir() and not include_tests and TESTS.search(inside.as_posix()):
                continue
            if file.suffix in UNREAD:
                unread[UNREAD[file.suffix]] += 1
            elif file.suffix in LANGUAGES and file.is_file():
                if file.stat().st_size < 1_000_000:
                    yield file
                else:
                    unread["files over 1 MB"] += 1


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        yield from (Path(here) / name for name in sorted(files))


# ---- versions


class Manifests:
    """Versions that are required or locked, from the scanned folders and up to the root of the repository."""

    def __init__(self, paths: Iterable[Path]) -> None:
        # (folder, language, package, version, locked)
        self._found: list[tuple[Path, str, str, str, bool]] = []
        self.names: set[str] = set()
        seen: set[Path] = set()
        for file in _manifests(paths):
            if file not in seen:
                seen.add(file)
                self._take(file)

    def of(self, language: str, package: str) -> list[str]:
        rows = [row for row in self._found if row[1:3] == (language, package)]
        locked = {row[0] for row in rows if row[4]}
        # A lock says what is installed, a range only what might be.
        return [row[3] for row in rows if row[4] or row[0] not in locked]

    def nearest(self, path: Path, language: str, package: str) -> str | None:
        rows = [row for row in self._found if row[1:3] == (language, package) and path.resolve().is_relative_to(row[0])]
        best = max(rows, key=lambda row: (len(row[0].parts), row[4]), default=None)
        return best[3] if best else None

    def _take(self, file: Path) -> None:
        text = file.read_text(errors="replace")
        folder = file.parent.resolve()
        try:
            for language, package, version, locked in _required(file.name, text):
                if file.suffix != ".lock":
                    self.names.add(package)
                number = re.search(r"\d+(\.\d+)*", version)
                if package in ("bullmq", "redis") and number:
                    self._found.append((folder, language, package, number[0], locked))
        except (ValueError, AttributeError, TypeError):
            return  # not a manifest after all


def _manifests(paths: Iterable[Path]) -> Iterator[Path]:
    names = (
        "requirements*.txt", "pyproject.toml", "uv.lock", "poetry.lock", "Pipfile", "Pipfile.lock",
        "package.json", "package-lock.json", "yarn.lock", "pnpm-lock.yaml", "go.mod",
    )  # fmt: skip
    for path in paths:
        below = path if path.is_dir() else path.parent
        for file in _walk(path) if path.is_dir() else sorted(path.parent.iterdir()):
            if any(file.match(name) for name in names):
                yield file
        # Called with `src/`, the manifest is above it.
        here = below.resolve()
        while not (here / ".git").exists() and here != here.parent:
            here = here.parent
            for name in names:
                yield from here.glob(name)


def _required(name: str, text: str) -> Iterator[tuple[str, str, str, bool]]:
    """(language, package, version, locked)"""
    python, node = "Python", "TypeScript/JavaScript"
    requirement = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*((?:[=~<>!^]+)\s*[\w.*]+.*)?$")
    if name in ("uv.lock", "poetry.lock"):
        for package in tomllib.loads(text).get("package", []):
            yield python, package["name"], package.get("version", ""), True
    elif name == "pyproject.toml":
        project = tomllib.loads(text)
        listed = list(project.get("project", {}).get("dependencies", []))
        for extra in project.get("project", {}).get("optional-dependencies", {}).values():
            listed += extra
        for line in listed:
            if match := requirement.match(line.split(";")[0].strip()):
                yield python, match[1].lower(), _bound(match[2] or ""), False
        for package, wanted in project.get("tool", {}).get("poetry", {}).get("dependencies", {}).items():
            yield (python, package.lower(), wanted if isinstance(wanted, str) else wanted.get("version", ""), False)
    elif name == "Pipfile":
        for package, wanted in tomllib.loads(text).get("packages", {}).items():
            yield (python, package.lower(), wanted if isinstance(wanted, str) else wanted.get("version", ""), False)
    elif name == "Pipfile.lock":
        for package, wanted in json.loads(text).get("default", {}).items():
            yield python, package.lower(), wanted.get("version", ""), True
    elif name.endswith(".txt"):
        for line in text.splitlines():
            if match := requirement.match(re.split(r"[;#\\]|--", line)[0].strip()):
                yield python, match[1].lower(), _bound(match[2] or ""), "==" in (match[2] or "")
    elif name == "package.json":
        project = json.loads(text)
        for package, wanted in (project.get("dependencies", {}) | project.get("devDependencies", {})).items():
            yield node, package, str(wanted), False
    elif name == "package-lock.json":
        for path, package in json.loads(text).get("packages", {}).items():
            if path == "node_modules/bullmq":
                yield node, "bullmq", package.get("version", ""), True
    elif name == "yarn.lock":
        if match := re.search(r"^\"?bullmq@[^\n]*\n\s+version:?\s+\"?([\d.]+)", text, re.MULTILINE):
            yield node, "bullmq", match[1], True
    elif name == "pnpm-lock.yaml":
        if match := re.search(r"^\s+['\"]?/?bullmq[@/]([\d.]+)", text, re.MULTILINE):
            yield node, "bullmq", match[1], True
    elif name == "go.mod":
        for match in re.finditer(
            r"^\s*(?:require\s+)?([\w.-]+\.[\w.-]+/[\w./-]+)\s+v([\d.]+)(?! // indirect)", text, re.MULTILINE
        ):
            yield "Go", match[1], match[2], True


def _bound(wanted: str) -> str:
    """`>=6.2,<9` may be 8: without an exact version the highest one allowed counts."""
    if below := re.search(r"<\s*(\d+)(?![\d.]*\.[1-9])", wanted):
        return str(int(below[1]) - 1)
    return "" if wanted.startswith(">") else wanted
