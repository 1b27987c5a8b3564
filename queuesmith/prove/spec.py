"""prove.toml as dataclasses. Errors name the line of the file and what to write instead."""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

SERVERS = ("redis", "postgres", "rabbitmq", "nats", "kafka", "sqs")
PLACEHOLDERS = (
    *("key", "keys", "dir", "port", "instance", "canary", *SERVERS),
    *(f"{server}.{part}" for server in SERVERS for part in ("host", "port")),
)
SOURCES = ("json", "header", "path", "query", "form")
ANSWERS = ("ok", "lost", "slow", "hang")
DUPLICATES = ("none", "same key", "allowed")
_HOLE = re.compile(r"(?<!\{)\{([A-Za-z_][\w.-]*)\}(?!\})")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Wrong(Exception):
    """The set-up is wrong, not the service: the message says where, and what to do."""


@dataclass(frozen=True)
class Command:
    """A program and its arguments; no shell (write `sh -c '…'` for one)."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class Request:
    """`id`: where the answer holds the service's own id for the job, if that is not its key: `json:id`."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    id: str = ""


Submit = Command | Request


@dataclass(frozen=True)
class Program:
    """A process of the service. `ready`: an address that answers 2xx, or text of a line that it prints."""

    run: Command
    ready: str = ""


@dataclass(frozen=True)
class Service:
    name: str
    worker: Program
    submit: Submit
    workers: int = 2
    api: Program | None = None
    next: Command | None = None
    setup: Command | None = None
    poison: Submit | None = None
    failing: Submit | None = None
    foreign: Command | None = None
    queue: str = ""
    prefix: str = "bull"
    env: Mapping[str, str] = field(default_factory=dict)
    keys: str = "text"
    lock: float = 30.0
    redelivery: float = 0.0  # until the queue itself redelivers a dead worker's jobs, if later than recovery
    jobs: int = 12


@dataclass(frozen=True)
class Probe:
    """How to see what happened per key: by `kind` sql, redis, http, command, log or provider (one or more)."""

    kind: str
    target: str
    query: str = ""
    count: str = ""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    keyed_by: str = ""
    effect: str = ""
    several: bool = False
    lookup: str = ""
    answers: tuple[tuple[str, float], ...] = (("ok", 1.0),)
    latency: tuple[float, float] = (0.02, 0.08)
    key_ttl: float = 86_400.0
    retry_after: float = 2.0
    status: int = 200
    reply: Any = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Provider:
    name: str
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Promises:
    """What the service promises, with the defaults that people expect."""

    duplicates: str = "none"
    failed: str = "none"
    recovery: float = 30.0
    shutdown: float = 30.0
    exit_codes: tuple[int, ...] = (0,)
    enqueue: float = 10.0
    wake: float = 5.0
    crashes: int = 5
    calls_per_second: int = 10
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    file: Path
    service: Service
    effect: Probe
    failures: Probe | None = None
    providers: tuple[Provider, ...] = ()
    promises: Promises = field(default_factory=Promises)
    outage: float = 6.0
    redis: bool = True
    redis_config: Mapping[str, str] = field(default_factory=dict)
    postgres: bool = False
    rabbitmq: bool = False
    nats: bool = False
    kafka: bool = False
    sqs: bool = False

    @property
    def folder(self) -> Path:
        return self.file.parent

    def line(self, place: str) -> str:
        """` (prove.toml, line 5)`, for errors found later."""
        number = _line(self.file.read_text(encoding="utf-8"), place)
        return f" ({self.file.name}, line {number})" if number else ""

    @property
    def alone(self) -> bool:
        """Would two copies collide, on a port or in a database that the file fixes?"""
        service = self.service
        fixed_port = service.api is not None and not any(
            "{port" in text for text in _strings([service.api, service.env])
        )
        own_store = self.effect.kind == "sql" and not re.search(r"\{(dir|postgres)\}", self.effect.target)
        return fixed_port or own_store

    def says(self, hole: str) -> bool:
        """Does a submit, a command or the environment contain this placeholder?"""
        return any(hole in text for text in _strings([self.service.submit, self.service.env, self.service.worker]))


def load(path: Path) -> Spec:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Wrong(f"{path} is not there. `queuesmith prove init` writes a first one") from None
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Wrong(f"{path}: not TOML: {error}") from None
    top = Table(path, text, "", content)
    names = tuple(f"provider.{name}" for name in content.get("provider", {}))
    used = set()
    for where, value in _leaves(content):
        for hole in _HOLE.findall(value):
            used.add(hole.partition(".")[0])
            # a route's own {parameters}
            if hole not in (*PLACEHOLDERS, *names) and not where.startswith("provider."):
                known = (*PLACEHOLDERS[: 6 + len(SERVERS)], *names)
                top.wrong(
                    where,
                    f"{{{hole}}} is not known. Known: {', '.join(f'{{{name}}}' for name in known)}"
                    f"; a brace of your own is written {{{{{hole}}}}}",
                )
    providers = tuple(_provider(top, name, table) for name, table in top.table("provider", {}).tables())
    servers = top.table("servers", {})
    redis = servers.take("redis", (bool, dict), True)
    promises = _promises(top.table("promises", {}))
    service = _service(top.table("service"), path)
    faults = top.table("faults", {})
    outage = faults.time("outage", Spec.outage)
    faults.end()
    effect = _probe(top, "effect", providers, needed=True)
    assert effect is not None
    spec = Spec(
        file=path.resolve(),
        service=service,
        effect=effect,
        failures=_probe(top, "failures", providers, needed=False),
        providers=providers,
        promises=promises,
        outage=outage,
        redis=redis is not False,
        redis_config={name: str(value) for name, value in redis.items()} if isinstance(redis, dict) else {},
        postgres=servers.take("postgres", bool, "postgres" in used),
        rabbitmq=servers.take("rabbitmq", bool, "rabbitmq" in used),
        nats=servers.take("nats", bool, "nats" in used),
        kafka=servers.take("kafka", bool, "kafka" in used),
        sqs=servers.take("sqs", bool, "sqs" in used),
    )
    servers.end()
    top.end()
    return spec


def seconds(text: str) -> float:
    """`50ms`, `2s`, `30m`, `1.5h`; ValueError for everything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not a time. Write it like 500ms, 2s or 30m")
    return float(match[1]) * _UNITS[match[2]]


def fill(text: str, values: Mapping[str, object]) -> str:
    """`{key}` -> its value; `{{x}}` -> `{x}`."""
    full = _HOLE.sub(lambda hole: str(values.get(hole[1], hole[0])), text)
    return full.replace("{{", "{").replace("}}", "}") if "{{" in text else full


def fill_all(value: Any, values: Mapping[str, object]) -> Any:
    """`fill` through lists and tables."""
    if isinstance(value, str):
        return fill(value, values)
    if isinstance(value, Mapping):
        return {fill(name, values): fill_all(item, values) for name, item in value.items()}
    return [fill_all(item, values) for item in value] if isinstance(value, list | tuple) else value


class Table:
    """A table of the file that knows which keys were read: any other is a mistake."""

    def __init__(self, path: Path, text: str, name: str, content: Mapping[str, Any]) -> None:
        self.path, self.text, self.name = path, text, name
        self._unread = dict(content)
        self._known: list[str] = []

    @property
    def place(self) -> str:
        return f"in [{self.name}]" if self.name else "in the file"

    def take(self, key: str, kind: Any, default: Any = ...) -> Any:
        self._known.append(key)
        if key not in self._unread:
            if default is ...:
                for near in difflib.get_close_matches(key, self._unread, 1, 0.7):
                    self.wrong(near, f"`{near}` is not known {self.place}; did you mean `{key}`?")
                example = _EXAMPLES.get(f"{self.name}.{key}", "")
                self.wrong("", f"`{key}` is missing {self.place}. {example}".rstrip())
            return default
        value = self._unread.pop(key)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(_KINDS[kind] for kind in kinds)
            self.wrong(key, f"`{key}` is {_KINDS.get(type(value), 'something else')}; write {wanted}")
        return value

    def time(self, key: str, default: float) -> float:
        value = self.take(key, str, None)
        if value is None:
            return default
        try:
            return seconds(value)
        except ValueError as error:
            self.wrong(key, f"`{key}`: {error}")

    def table(self, key: str, default: Any = ...) -> Table:
        content = self.take(key, dict, default)
        return Table(self.path, self.text, f"{self.name}.{key}".strip("."), content)

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Everything in it, each a table."""
        for key in list(self._unread):
            yield key, self.table(key)

    def end(self) -> None:
        for key in self._unread:
            near = difflib.get_close_matches(key, self._known, 1, 0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(self._known)}"
            self.wrong(key, f"`{key}` is not known {self.place}; {hint}")

    def wrong(self, key: str, why: str) -> NoReturn:
        line = _line(self.text, f"{self.name}.{key}".strip("."))
        raise Wrong(f"{self.path}{f', line {line}' if line else ''}: {why}")


_KINDS: dict[type, str] = {
    str: "text in quotes",
    int: "a number",
    bool: "true or false",
    dict: "a table like { a = 1 }",
    list: "a list, in brackets",
    float: "a number",
}
_EXAMPLES = {
    ".service": 'Write [service] with worker = "python worker.py" and submit = "python submit.py {key}"',
    ".effect": 'Write [effect] with sql = "sqlite:///{dir}/app.db" and '
    'query = "select id, count(*) from done group by 1"',
    "service.worker": 'Write the command that starts it: worker = "python worker.py"',
    "service.submit": 'Write the command that sends one job: submit = "python submit.py {key}", '
    'or a request: submit = { method = "POST", url = "http://127.0.0.1:{port}/jobs", json = { id = "{key}" } }',
    "effect.query": 'Write what happened per key: query = "select parcel, count(*) from labels group by 1"',
}


def _service(table: Table, path: Path) -> Service:
    keys = table.take("keys", str, "text")
    if keys not in ("text", "number", "uuid", "date") and not all(f"%{part}" in keys for part in "Ymd"):
        table.wrong("keys", f'`keys` is "{keys}"; write "text", "number", "uuid", "date" or a form of dates, "%Y%m%d"')
    service = Service(
        name=table.take("name", str, path.resolve().parent.name),
        worker=_program(table, "worker"),
        submit=_submit(table, "submit"),
        workers=table.take("workers", int, 2),
        api=_program(table, "api") if "api" in table._unread else None,
        next=_command(table, "next", table.take("next", (str, list), None)),
        setup=_command(table, "setup", table.take("setup", (str, list), None)),
        poison=_submit(table, "poison", None),
        failing=_submit(table, "failing", None),
        foreign=_command(table, "foreign", table.take("foreign", (str, list), None)),
        queue=table.take("queue", str, ""),
        prefix=table.take("prefix", str, "bull"),
        env={name: str(value) for name, value in table.take("env", dict, {}).items()},
        keys=keys,
        lock=table.time("lock", 30.0),
        redelivery=table.time("redelivery", 0.0),
        jobs=table.take("jobs", int, 12),
    )
    table.end()
    if not 1 <= service.workers <= 20:
        table.wrong("workers", f"`workers` is {service.workers}; write 1 to 20")
    if not 2 <= service.jobs <= 1000:
        table.wrong("jobs", f"`jobs` is {service.jobs}; write 2 to 1000")
    sent = list(_strings(service.submit))
    if "{keys}" not in sent and not any("{key}" in text for text in sent):
        table.wrong(
            "submit",
            "`submit` has no {key}: without it one job cannot be told from another. "
            "{keys}, as a word of its own in a command, stands for one or more",
        )
    return service


def _command(table: Table, key: str, value: str | list[Any] | None) -> Command | None:
    if value is None:
        return None
    try:
        words = tuple(map(str, value)) if isinstance(value, list) else tuple(shlex.split(value))
    except ValueError as error:
        table.wrong(key, f"`{key}`: {error}")
    if not words:
        table.wrong(key, f"`{key}` is empty; write a command")
    return Command(words)


def _program(table: Table, key: str) -> Program:
    value = table.take(key, (str, list, dict))
    inner = Table(table.path, table.text, f"{table.name}.{key}", value if isinstance(value, dict) else {"run": value})
    run = _command(inner, "run", inner.take("run", (str, list)))
    assert run is not None
    program = Program(run, inner.take("ready", str, ""))
    inner.end()
    return program


def _submit(table: Table, key: str, default: Any = ...) -> Any:
    value = table.take(key, (str, list, dict), default)
    if not isinstance(value, dict):
        return _command(table, key, value)
    inner = Table(table.path, table.text, f"{table.name}.{key}", value)
    request = Request(
        inner.take("method", str, "POST"),
        inner.take("url", str),
        inner.take("headers", dict, {}),
        inner.take("json", (dict, list, str), None),
        inner.take("id", str, ""),
    )
    if request.id and not request.id.startswith("json:"):
        inner.wrong("id", f'`id` is "{request.id}"; write where it stands in the answer: "json:id"')
    inner.end()
    return request


def _probe(top: Table, name: str, providers: Sequence[Provider], *, needed: bool) -> Probe | None:
    effective = [provider.name for provider in providers if any(route.effect for route in provider.routes)]
    if name not in top._unread and (not needed or len(effective) == 1):
        top.take(name, dict, None)
        return Probe("provider", effective[0]) if needed else None
    if name not in top._unread and effective:
        listed = ", ".join(f'"{provider}"' for provider in effective)
        top.wrong("", f"`effect` is missing. Write [effect] with provider = [{listed}]: those that every job calls")
    table = top.table(name)
    kinds = ("sql", "redis", "http", "command", "log", "provider")
    forms = {kind: (str, list) if kind == "provider" else str for kind in kinds}
    given = [(kind, target) for kind in kinds if (target := table.take(kind, forms[kind], None)) is not None]
    if len(given) != 1:
        table.wrong("", f"[{name}] needs exactly one of {', '.join(kinds)}: how to see what happened to a key")
    (kind, target), count = given[0], table.take("count", str, "")
    query = table.take("query", str) if kind == "sql" else ""
    if kind == "sql" and not re.match(r"(sqlite:///|postgres(ql)?(\+\w+)?://|\{postgres\})", target):
        table.wrong("sql", '`sql` is an address: "sqlite:///{dir}/app.db" or "{postgres}"')
    if kind == "provider":
        names = target if isinstance(target, list) else [target]
        if not names or not set(names) <= set(effective):
            wrong = ", ".join(f'"{provider}"' for provider in names if provider not in effective) or "none"
            table.wrong(kind, f"`provider` names {wrong}; with an effect there is: {', '.join(effective) or 'none'}")
        target = " ".join(names)
    if kind in ("http", "log") and "{key}" not in target:
        table.wrong(kind, f"`{kind}` has no {{key}}")
    table.end()
    return Probe(kind, target, query, count)


def _provider(top: Table, name: str, table: Table) -> Provider:
    routes = []
    for key, route in table.tables():
        match = re.fullmatch(r"(GET|POST|PUT|PATCH|DELETE) (/\S*)", key)
        if not match:
            table.wrong(key, f'`{key}` is not a route; write it like "POST /labels" or "GET /labels/{{id}}"')
        routes.append(
            Route(
                match[1],
                match[2],
                keyed_by=_source(route, "keyed_by"),
                effect=_source(route, "effect"),
                several=route.take("several", bool, False),
                lookup=_source(route, "lookup"),
                answers=_answers(route),
                latency=_latency(route),
                key_ttl=route.time("key_ttl", 86_400.0),
                retry_after=route.time("retry_after", 2.0),
                status=route.take("status", int, 200),
                reply=route.take("reply", (dict, list, str), None),
            )
        )
        if not routes[-1].keyed_by and "{key}" in str(routes[-1].reply):
            route.wrong("reply", "{key} in a `reply` is what `keyed_by` names, which is missing")
        route.end()
    if not routes:
        table.wrong("", f'[provider.{name}] has no route; write "POST /labels" = {{ effect = "json:parcel" }}')
    return Provider(name, tuple(routes))


def _source(table: Table, key: str) -> str:
    value = str(table.take(key, str, ""))
    if value and value.partition(":")[0] not in SOURCES:
        forms = ", ".join(f"{kind}:NAME" for kind in SOURCES)
        table.wrong(key, f'`{key}` is "{value}"; write where it stands: {forms}')
    return value


def _answers(table: Table) -> tuple[tuple[str, float], ...]:
    value = table.take("answers", str, "ok 100%")
    mix = []
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\w+)\s+(\d+(?:\.\d+)?)\s*%\s*", part)
        if not match or not (match[1] in ANSWERS or re.fullmatch(r"[45]\d\d", match[1])):
            table.wrong("answers", f'`answers`: cannot read "{part.strip()}"; write "ok 92%, lost 3%, 500 3%, 429 2%"')
        mix.append((match[1], float(match[2]) / 100))
    if abs(sum(share for _, share in mix) - 1) > 0.001:
        table.wrong("answers", f"`answers` add up to {sum(share for _, share in mix):.0%}; write 100% in all")
    return tuple(mix)


def _latency(table: Table) -> tuple[float, float]:
    value = table.take("latency", str, "20ms..80ms")
    low, _, high = value.partition("..")
    try:
        return seconds(low), seconds(high or low)
    except ValueError:
        table.wrong("latency", f'`latency` is "{value}"; write a time or a range: "50ms..2s"')


def _promises(table: Table) -> Promises:
    from .faults import FAULTS

    default = Promises()

    def choice(key: str, choices: Sequence[str], otherwise: str) -> str:
        value = str(table.take(key, str, otherwise))
        if value not in choices:
            table.wrong(key, f'`{key}` is "{value}"; write one of: {", ".join(map(repr, choices))}')
        return value

    promises = Promises(
        duplicates=choice("duplicates", DUPLICATES, default.duplicates),
        failed=choice("failed", ("none", "visible"), default.failed),
        recovery=table.time("recovery", default.recovery),
        shutdown=table.time("shutdown", default.shutdown),
        exit_codes=tuple(table.take("exit_codes", list, list(default.exit_codes))),
        enqueue=table.time("enqueue", default.enqueue),
        wake=table.time("wake", default.wake),
        crashes=table.take("crashes", int, default.crashes),
        calls_per_second=table.take("calls_per_second", int, default.calls_per_second),
        skip=tuple(table.take("skip", list, [])),
    )
    table.end()
    for name in promises.skip:
        if name not in FAULTS:
            table.wrong("skip", f'`skip` names "{name}"; the faults are: {", ".join(FAULTS)}')
    return promises


def _leaves(node: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield where, node
    items: Callable[[], Any] | None = getattr(node, "items", None)
    for key, value in items() if items else ((where, item) for item in node) if isinstance(node, list) else ():
        yield from _leaves(value, where if isinstance(node, list) else f"{where}.{key}".strip("."))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from (name, *_strings(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _strings(getattr(value, name))


def _line(text: str, dotted: str) -> int | None:
    """The line of the table or key `a.b.c`, or of its deepest part that is there."""
    table, best, depth = "", None, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\]]+)\]", line):
            table = header[1].strip().replace('"', "")
        named = re.match(r"""\s*("[^"]+"|[\w.-]+)\s*=""", line)
        place = table if header else f"{table}.{named[1].strip(chr(34))}".strip(".") if named else ""
        if place and (dotted == place or dotted.startswith(place + ".")) and len(place) > depth:
            best, depth = number, len(place)
    return best
