"""`queuesmith prove init`: looks at a repository and writes a first prove.toml, its questions as comments."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from queuesmith.record import OURS, Record, Refused

from .spec import Spec, Wrong

_SKIPPED = {".git", ".venv", ".prove", "venv", "node_modules", "__pycache__", "dist", "build", ".tox"}
_MOST_FILES = 3000


@dataclass(frozen=True)
class Found:
    """What a repository uses: `stack`, the command of its worker, the name of its queue, and where that was seen."""

    stack: str
    worker: str
    queue: str
    seen: str
    setup: str = ""
    src: bool = False  # its modules are in src/


# stack, pattern of a file's text, command ({file}, {module}, {name}), pattern of the queue's name
_STACKS = (
    (
        "BullMQ for Python",
        r"from bullmq import[^\n]*Worker|import bullmq|ReliableWorker\(",
        "python {file}",
        r"Worker\(\s*(f?[\"'][\w:.-]+|\w+\s*,)",
    ),
    ("Celery", r"(\w+)\s*=\s*Celery\(", "celery -A {module} worker --concurrency 4", None),
    (
        "RQ",
        r"from rq import[^\n]*(?:Queue|Worker)",
        "rq worker --url {{redis}} {queue}",
        r"Queue\(\s*([\"'][\w:.-]+|\w+\s*[,)])",
    ),
    ("dramatiq", r"@dramatiq\.actor|import dramatiq", "dramatiq {module}", None),
    ("arq", r"class (\w*WorkerSettings\w*)", "arq {module}.{name}", None),
    # built first: `go run` does not pass signals on
    ("asynq", r"asynq\.NewServer\(", "{{dir}}/worker", None),
    (
        "BullMQ for Node",
        r"new Worker\s*(?:<[^>]*>)?\(",
        "node {file}",
        r"new Worker\s*(?:<[^>]*>)?\(\s*([\"'`][\w:.-]+|\w+\s*,)",
    ),
)
_SUFFIXES = {".py": "python", ".go": "go", ".js": "node", ".mjs": "node", ".cjs": "node", ".ts": "node"}


# The page that says how to fix it in that stack, known by its command or by what its program imports.
_PAGES = {
    "Celery": "celery",
    "RQ": "rq",
    "dramatiq": "dramatiq",
    "arq": "arq",
    "asynq": "asynq",
    "BullMQ for Node": "bullmq-ts",
}
_COMMANDS = {"celery": "Celery", "rq": "RQ", "dramatiq": "dramatiq", "arq": "arq"}


def page_of(spec: Spec) -> str:
    """`celery` for skills/…/stacks/celery.md; empty for BullMQ in Python and for unknown stacks."""
    words = spec.service.worker.run.words
    for word in words:
        if stack := _COMMANDS.get(Path(word).name):
            return _PAGES[stack]
    for word in words:
        for name in (word, f"{word.replace('.', '/')}.py"):
            path = spec.folder / name
            if path.suffix in _SUFFIXES and path.is_file() and (hit := _recognise(path)):
                return _PAGES.get(hit[0], "")
    # A compiled program, or one started by a script.
    file, library, page = ("go.mod", "hibiken/asynq", "asynq")
    if words[0] in ("node", "npm", "npx", "pnpm", "yarn", "bun", "tsx"):
        file, library, page = "package.json", '"bullmq"', "bullmq-ts"
    path = spec.folder / file
    used = path.is_file() and library in path.read_text(encoding="utf-8", errors="replace")
    return page if used else ""


def _recognise(path: Path) -> tuple[str, re.Match[str], str, str | None, str] | None:
    """Stack, match, command, pattern of the queue's name, and the text."""
    text = path.read_text(encoding="utf-8", errors="replace")[:200_000]
    kind = _SUFFIXES[path.suffix]
    for stack, pattern, command, queue in _STACKS:
        language = "go" if stack == "asynq" else "node" if stack.endswith("Node") else "python"
        if kind == language and (match := re.search(pattern, text)):
            return stack, match, command, queue, text
    return None


def look_at(folder: Path) -> Found | None:
    """The first worker found; files named `worker` come first."""
    for path in sorted(
        _own_files(folder), key=lambda path: ("worker" not in path.name, "test" in str(path), str(path))
    ):
        if hit := _recognise(path):
            stack, match, command, queue, text = hit
            named = re.search(queue, text) if queue else None
            name = _value(folder, named[1]) if named else ""
            where = path.relative_to(folder)
            module = ".".join(where.with_suffix("").parts).removesuffix(".__init__")
            run = command.format(
                file=where.as_posix(),
                module=module.removeprefix("src."),
                name=match[1] if match.groups() else "",
                queue=name or "default",
            )
            if path.suffix == ".ts":
                run = run.replace("node ", "npx tsx ")
            setup = f"go build -o {{dir}}/worker ./{where.parent.as_posix()}" if stack == "asynq" else ""
            return Found(stack, run, name, where.as_posix(), setup, path.suffix == ".py" and module.startswith("src."))
    package = folder / "package.json"
    if package.is_file() and '"bullmq"' in package.read_text(encoding="utf-8", errors="replace"):
        return Found("BullMQ for Node", "npm run worker", "", "package.json")
    return None


def uses_redis(spec: Spec) -> bool:
    used = re.compile(r"^[^#\n]*redis", re.M | re.I)
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in (spec.file, *_own_files(spec.folder)))
    return bool(spec.service.queue or look_at(spec.folder) or any(map(used.search, texts)))


def _value(folder: Path, word: str) -> str:
    """The text of `"mails"`, or of the name `QUEUE,` if the repository assigns it; else empty."""
    word = word.strip(" ,)")
    if not word.isidentifier():
        return word.lstrip("f").strip("\"'`")
    given = re.compile(rf"\b{word}\b[^=\n]{{0,40}}=\s*[\"'`]([\w:.-]+)")
    for path in _files(folder):
        if match := given.search(path.read_text(encoding="utf-8", errors="replace")[:200_000]):
            return match[1]
    return ""


_ENV = re.compile(r"""(?:environ(?:\.get\(|\[)|[gG]etenv\(|process\.env(?:\.|\[))\s*["'`]?([A-Z][A-Z0-9_]+)""")
_SENDERS = ("submit", "enqueue", "send", "produce", "producer", "publish", "client")


def _environment(folder: Path, repo: Found | None) -> tuple[dict[str, str], list[str]]:
    """Of the variables that the code reads: those we can set, and the others."""
    names = set()
    for path in _own_files(folder):
        if "test" not in path.name:
            names |= set(_ENV.findall(path.read_text(encoding="utf-8", errors="replace")[:200_000]))
    clear = {"PYTHONPATH": "src"} if repo and repo.src else {}
    for name in sorted(names - {"REDIS_URL"}):
        if "REDIS" in name or "BROKER" in name or name == "CELERY_RESULT_BACKEND":
            part = next((part for part in ("HOST", "PORT") if name.endswith(part)), "")
            clear[name] = f"{{redis.{part.lower()}}}" if part else "{redis}"
    return clear, sorted(names - clear.keys() - {"REDIS_URL", "PORT", "PATH", "HOME"})


def _sender(folder: Path, stack: str) -> str:
    """A program that seems to send a job, or the name of one to be written."""
    suffix, run = ".py", "python"
    if stack.endswith("Node"):
        suffix, run = ".js", "node"
    if stack == "asynq":
        names = [path.parent for path in _files(folder) if path.name == "main.go" and path.parent.name in _SENDERS]
        where = names[0].relative_to(folder).as_posix() if names else "cmd/submit"
        return f"go run ./{where} {{key}}"
    for path in sorted(_files(folder), key=lambda path: (len(path.parts), path.name)):
        text = path.read_text(encoding="utf-8", errors="replace")[:200_000]
        if path.stem in _SENDERS and path.suffix[-2:] == suffix[-2:] and "argv" in text:
            return f"{run} {path.relative_to(folder).as_posix()} {{key}}"
    return f"{run} submit{suffix} {{key}}"


@dataclass(frozen=True)
class Api:
    """What takes requests: how it is started, where a job is posted, with which field, and where it says it is up."""

    kind: str
    run: str
    path: str
    field: str
    ready: str
    seen: str


_APP = re.compile(r"^(\w+)\s*(?::\s*\w+\s*)?=\s*(Flask|FastAPI)\(", re.MULTILINE)
_ROUTE = re.compile(r"""@\w+\.(get|post|put|route)\(\s*["']([^"']+)["']([^\n]*)""")
_FIELD = re.compile(
    r"""(?:json|body|data|payload|form|get_json\([^)]*\))(?:\.get\(|\[)\s*["'](\w+)["']|\(BaseModel\):\s+(\w+):"""
)
_HEALTH = ("/healthz", "/health", "/readyz", "/ready", "/livez", "/ping", "/")


def _api(folder: Path) -> Api | None:
    """Of Flask or FastAPI, the first that takes a POST."""
    for path in sorted(_own_files(folder), key=lambda path: ("test" in path.name, len(path.parts), path.name)):
        text = path.read_text(encoding="utf-8", errors="replace")[:200_000] if path.suffix == ".py" else ""
        routes = list(_ROUTE.finditer(text))
        posts = [route for route in routes if route[1] in ("post", "put") or "POST" in route[3]]
        if (app := _APP.search(text)) and posts:
            where = path.relative_to(folder)
            module = ".".join(where.with_suffix("").parts).removeprefix("src.").removesuffix(".__init__")
            starts = {"Flask": "flask --app {}:{} run", "FastAPI": "uvicorn {}:{}"}[app[2]]
            gets = {route[2] for route in routes if route not in posts and not set("<{") & set(route[2])}
            ready = next((name for name in _HEALTH if name in gets), min(gets, default=""))
            field = _FIELD.search(text, posts[0].end()) or _FIELD.search(text)
            run = f"{starts.format(module, app[1])} --port {{port}}"
            return Api(app[2], run, posts[0][2], field[1] or field[2] if field else "id", ready, where.as_posix())
    return None


def write_first(folder: Path, *, force: bool = False) -> int:
    target = folder / "prove.toml"
    if target.exists() and not force:
        raise Wrong(f"{target} is there already; --force writes it again")
    repo, api = look_at(folder), _api(folder)
    target.write_text(_text(folder, repo, api), encoding="utf-8")
    seen = f"{repo.stack}, seen in {repo.seen}" if repo else "no queue library was recognised"
    seen += f"; {api.kind}, seen in {api.seen}" if api else ""
    print(f"{target} written ({seen}).\nAnswer its questions, then: queuesmith prove {target} --quick")
    return 0


def _text(folder: Path, repo: Found | None, api: Api | None) -> str:
    worker = repo.worker if repo else "python worker.py"
    locks = {"BullMQ": "lockDuration", "Celery": "visibility_timeout", "RQ": "job timeout"}
    what = next((value for name, value in locks.items() if repo and repo.stack.startswith(name)), "lock")
    submit = f'submit = "{_sender(folder, repo.stack if repo else "")}"'
    post = '# submit = { method = "POST", url = "http://127.0.0.1:{port}/jobs", json = { id = "{key}" } }'
    start = '# api = { run = "python api.py --port {port}", ready = "http://127.0.0.1:{port}/healthz" }'
    if api:
        submit = (
            post[2:].replace("/jobs", re.sub(r"<[^>]*>|{[^}]*}", "{key}", api.path)).replace(" id ", f" {api.field} ")
        )
        post = f'# submit = "{_sender(folder, "")}"'
        ready = f', ready = "http://127.0.0.1:{{port}}{api.ready}"' if api.ready else ""
        start = f'api = {{ run = "{api.run}"{ready} }}'
    bullmq = repo is not None and repo.stack.startswith("BullMQ")
    queue = f'queue = "{repo.queue}"' if repo and bullmq and repo.queue else '# queue = "jobs"'
    setup = f'setup = "{repo.setup}"' if repo and repo.setup else '# setup = "python migrate.py"'
    clear, unclear = _environment(folder, repo)
    env = '# env = { DATABASE_URL = "sqlite:///{dir}/app.db", API_TOKEN = "{canary}" }'
    if clear:
        env = "env = { " + ", ".join(f'{name} = "{value}"' for name, value in clear.items()) + " }"
    reads = f"# It reads: {', '.join(unclear[:12])}.\n" if unclear else ""
    return f"""\
# What `queuesmith prove` runs and what it compares. {f"Seen: {repo.stack} in {repo.seen}." if repo else ""}
# REDIS_URL is set for every process; {{redis}} is the same address, {{dir}} an empty folder, {{port}} a free port.

[service]
# Is this how a worker is started, in this folder? Any command in any language; no shell.
worker = "{worker}"
workers = 2
# How is one job sent? A command that ends with 0 when it was taken ({{keys}} instead of {{key}}: one or more, which
# saves time), or
{post}
{submit}
# Is there an api to start? {{port}} is its port, and so is its PORT.
{start}
# Must tables be made, or programs built, first?
{setup}
# What else does it need? A {{canary}} in a secret or in the payload must never be seen in the logs.
# Write {{redis.host}} and {{redis.port}} if it wants them apart, {{postgres}} for a PostgreSQL server.
{reads}{env}
# The BullMQ queue: it is searched for failed jobs, and foreign ones are put on it.
{queue}
# After how long does another worker take over the job of a frozen one ({what})?
lock = "30s"
# How is a job sent that kills its worker? One that can never succeed?
# poison = "python submit.py {{key}} --crash"
# failing = "python submit.py {{key}} --invalid"

# What shows, per key, what happened? Rows of key and count: sql, or redis = "HGETALL done",
# or http = "http://127.0.0.1:{{port}}/jobs/{{key}}", or command = "python count.py", or log = "sent {{key}}",
# or provider = "NAME".
[effect]
sql = "sqlite:///{{dir}}/app.db"
query = "select id, count(*) from done group by 1"

# Which provider does a job call? We play it, and it misbehaves; its address is {{provider.mail}}.
# [provider.mail]
# "POST /messages" = {{ keyed_by = "header:Idempotency-Key", effect = "json:to", answers = "ok 94%, lost 3%, 500 3%" }}

# What does it promise? These are the defaults.
[promises]
duplicates = "none"      # or "same key", or "allowed"
failed = "none"          # or "visible": a crash may make a job fail if that can be seen
recovery = "30s"         # work that a fault left undone is done within this
shutdown = "30s"
enqueue = "10s"          # a submit answers within this, even without Redis
# skip = ["redis-full"]  # faults it does not promise to survive
"""  # noqa: S608


def _own_files(folder: Path) -> Iterator[Path]:
    """Without what `queuesmith add` copied: what those files read is set where they are called."""
    try:
        entries = Record.read(folder).packages.values()
    except Refused:
        entries = {}.values()
    files = {path: file["from"] for entry in entries for path, file in entry["files"].items()}
    copied = {path for path, origin in files.items() if origin.startswith((OURS, "tests/"))}
    return (path for path in _files(folder) if path.relative_to(folder).as_posix() not in copied)


def _files(folder: Path) -> Iterator[Path]:
    stack, seen = [folder], 0
    while stack and seen < _MOST_FILES:
        for path in sorted(stack.pop().iterdir()):
            if path.is_dir() and not path.is_symlink() and path.name not in _SKIPPED:
                stack.append(path)
            elif path.suffix in _SUFFIXES and path.is_file():
                seen += 1
                yield path
