"""`queuesmith prove init`: looks at a repository and writes a first prove.toml, its questions as comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .spec import Wrong

__all__ = ["Found", "look_at", "write_first"]

_SKIPPED = {".git", ".venv", "venv", "node_modules", "__pycache__", "dist", "build", ".tox"}
_MOST_FILES = 3000


@dataclass(frozen=True)
class Found:
    """What a repository uses: `stack`, the command of its worker, the name of its queue, and where that was seen."""

    stack: str
    worker: str
    queue: str
    seen: str


# stack, pattern of a file's text, command ({file}, {module}, {name}), pattern of the queue's name
_STACKS = (
    (
        "BullMQ for Python",
        r"from bullmq import[^\n]*Worker|import bullmq|ReliableWorker\(",
        "python {file}",
        r"Worker\(\s*f?[\"']([\w:.-]+)",
    ),
    ("Celery", r"(\w+)\s*=\s*Celery\(", "celery -A {module} worker --concurrency 4", None),
    (
        "RQ",
        r"from rq import[^\n]*(?:Queue|Worker)",
        "rq worker --url {{redis}} {queue}",
        r"Queue\(\s*[\"']([\w:.-]+)",
    ),
    ("dramatiq", r"@dramatiq\.actor|import dramatiq", "dramatiq {module}", None),
    ("arq", r"class (\w*WorkerSettings\w*)", "arq {module}.{name}", None),
    ("asynq", r"asynq\.NewServer\(", "go run {folder}", None),
    (
        "BullMQ for Node",
        r"new Worker\s*(?:<[^>]*>)?\(",
        "node {file}",
        r"new Worker\s*(?:<[^>]*>)?\(\s*[\"'`]([\w:.-]+)",
    ),
)
_SUFFIXES = {".py": "python", ".go": "go", ".js": "node", ".mjs": "node", ".cjs": "node", ".ts": "node"}


def look_at(folder: Path) -> Found | None:
    """The first worker that is found, one that is named `worker` before others."""
    for path in sorted(
        _files(folder), key=lambda path: ("worker" not in path.name, "test" in str(path), str(path))
    ):
        text = path.read_text(encoding="utf-8", errors="replace")[:200_000]
        kind = _SUFFIXES[path.suffix]
        for stack, pattern, command, queue in _STACKS:
            language = "go" if stack == "asynq" else "node" if stack.endswith("Node") else "python"
            if kind == language and (match := re.search(pattern, text)):
                named = re.search(queue, text) if queue else None
                name = named[1] if named else ""
                where = path.relative_to(folder)
                words = {
                    "file": where.as_posix(),
                    "folder": f"./{where.parent.as_posix()}",
                    "module": ".".join(where.with_suffix("").parts).removeprefix("src."),
                    "name": match[1] if match.groups() else "",
                    "queue": name or "default",
                }
                run = command.replace("{{redis}}", "\0").format(**words).replace("\0", "{redis}")
                if path.suffix == ".ts":
                    run = run.replace("node ", "npx tsx ")
                return Found(stack, run, name, where.as_posix())
    package = folder / "package.json"
    if package.exists() and "bullmq" in json.loads(package.read_text()).get("dependencies", {}):
        return Found("BullMQ for Node", "npm run worker", "", "package.json")
    return None


def write_first(folder: Path, *, force: bool = False) -> int:
    target = folder / "prove.toml"
    if target.exists() and not force:
        raise Wrong(f"{target} is there already; --force writes it again")
    found = look_at(folder)
    target.write_text(_text(folder, found), encoding="utf-8")
    seen = f"{found.stack}, seen in {found.seen}" if found else "no queue library was recognised"
    print(f"{target} written ({seen}).\nAnswer its questions, then: queuesmith prove {target} --quick")
    return 0


def _text(folder: Path, found: Found | None) -> str:
    worker = found.worker if found else "python worker.py"
    locks = {
        "BullMQ": ("30s", "lockDuration"),
        "Celery": ("30s", "visibility_timeout"),
        "RQ": ("30s", "job timeout"),
    }
    lock, what = next(
        (value for name, value in locks.items() if found and found.stack.startswith(name)), ("30s", "lock")
    )
    python = (
        any((folder / name).exists() for name in ("pyproject.toml", "requirements.txt", "setup.py"))
        or not found
    )
    python = python or ".py" in worker or "celery" in worker
    submit = "python submit.py {key}" if python else "node submit.mjs {key}"
    bullmq = found is not None and found.stack.startswith("BullMQ")
    queue = f'queue = "{found.queue or "jobs"}"' if found and bullmq else '# queue = "jobs"'
    return f"""\
# What `queuesmith prove` runs and what it compares. {f"Seen: {found.stack} in {found.seen}." if found else ""}
# REDIS_URL is set for every process; {{redis}} is the same address, {{dir}} an empty folder, {{port}} a free port.

[service]
# Is this how a worker is started, in this folder? Any command in any language; no shell.
worker = "{worker}"
workers = 2
# How is one job sent? A command that ends with 0 when it was taken ({{keys}} instead of {{key}}: one or more, which
# saves time), or
# submit = {{ method = "POST", url = "http://127.0.0.1:{{port}}/jobs", json = {{ id = "{{key}}" }} }}
submit = "{submit}"
# Is there an api to start? {{port}} is its port.
# api = {{ run = "python api.py --port {{port}}", ready = "http://127.0.0.1:{{port}}/healthz" }}
# Are there tables to be made first?
# setup = "python migrate.py"
# What else does it need? A {{canary}} in a secret or in the payload must never be seen in the logs.
# env = {{ DATABASE_URL = "sqlite:///{{dir}}/app.db", API_TOKEN = "{{canary}}" }}
# The BullMQ queue: failed jobs are looked for in it, and foreign ones are put on it.
{queue}
# After how long does another worker take over the job of a frozen one ({what})?
lock = "{lock}"
# How is a job sent that kills its worker? One that can never succeed?
# poison = "python submit.py {{key}} --crash"
# failing = "python submit.py {{key}} --invalid"

# How is seen, per key, what happened? Rows of key and count: sql, or redis = "HGETALL done",
# or http = "http://127.0.0.1:{{port}}/jobs/{{key}}", or command = "python count.py", or provider = "NAME".
[effect]
sql = "sqlite:///{{dir}}/app.db"
query = "select id, count(*) from done group by 1"

# Which provider does a job call? We play it, and it misbehaves; its address is {{provider.mail}}.
# [provider.mail]
# "POST /messages" = {{ keyed_by = "header:Idempotency-Key", effect = "json:to", answers = "ok 94%, lost 3%, 500 3%" }}

# What does it promise? These are the defaults.
[promises]
duplicates = "none"      # or "same key", or "allowed"
failed = "none"          # or "visible": a job may fail by a crash if that can be seen
recovery = "30s"         # work that a fault left undone is done after at most so long
shutdown = "30s"
enqueue = "10s"          # a submit answers within this, Redis there or not
# skip = ["redis-full"]  # faults it does not promise to survive
"""  # noqa: S608


def _files(folder: Path) -> Iterator[Path]:
    stack, seen = [folder], 0
    while stack and seen < _MOST_FILES:
        for path in sorted(stack.pop().iterdir()):
            if path.is_dir() and not path.is_symlink() and path.name not in _SKIPPED:
                stack.append(path)
            elif path.suffix in _SUFFIXES and path.is_file():
                seen += 1
                yield path
