#!/usr/bin/env python3
"""Find in a codebase what loses, doubles or strands background work. Python by syntax tree, TypeScript by pattern.

    review_jobs.py [PATH…] [--json] [--fail-on critical|high|medium|low] [--include-tests] [--list-rules]

Exit code: 0 nothing at or above --fail-on (default: high), 1 findings, 2 wrong usage. Standard library only.
What a script can see is a start: every finding wants a look, and a clean report is no proof. Silence a finding
that is wrong with a comment on its line or the one before: `# queuesmith: ignore[rule] because …`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SEVERITIES = ("critical", "high", "medium", "low")
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
}
TESTS = re.compile(r"(^|/)(tests?|__tests__|specs?)(/|$)|(^|/)(test_[^/]*|[^/]*[._](test|spec))\.\w+$")
SCRIPTS = {".ts", ".tsx", ".mts", ".cts", ".js", ".jsx", ".mjs", ".cjs"}


@dataclass(frozen=True)
class Rule:
    id: str
    severity: str
    why: str
    fix: str
    proof: str
    page: str


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: str
    file: str
    line: int
    code: str
    why: str
    fix: str
    proof: str
    page: str


def _rules(*rows: tuple[str, str, str, str, str, str]) -> dict[str, Rule]:
    return {row[0]: Rule(*row) for row in rows}


RULES = _rules(
    # (id, severity, why it hurts, what to do, what proves the fix, page of the pattern)
    ("set-nx-idempotency", "critical", "SET NX before the work: one error or kill -9 and the retry is skipped as done",
     "write the marker in the transaction of the effect", "SIGKILL between marker and effect, deliver again: effect = 1",
     "background-jobs/idempotency"),
    ("lock-without-token", "high", "DEL without comparing a token deletes the lock of the next holder; a job longer than the TTL overlaps",
     "lease with token, renewal and fence, or a slot id for cron", "SIGSTOP the holder past its TTL, resume: its write is refused",
     "background-jobs/lease"),
    ("job-id-as-key", "high", "job ids are counters per queue: another queue's job 7 gets this one's result",
     "use a business key", "two queues, same id, different payloads: two effects", "background-jobs/idempotency"),
    ("repeat-option", "critical", "`repeat` in job options is ignored by BullMQ 6 and by Python: the job never recurs (BullMQ 5 repeats it)",
     "upsertJobScheduler, with the slot in the key of the effect", "three instances, kill the leader: one effect per slot",
     "background-jobs/schedule"),
    ("interval-loop", "high", "a timer runs in every instance and dies unnoticed with its process",
     "a job scheduler; or one evaluator with a conditional write", "three instances: one run per tick", "background-jobs/schedule"),
    ("task-not-held", "high", "the event loop keeps weak references: a task nobody holds may vanish, and its error with it",
     "hold it (TaskGroup, a set), or queue the work", "gc.collect() while it waits: it still ends", "async-flow/in-process-tasks"),
    ("missing-attempts", "high", "without `attempts` a job fails for good on its first error",
     "attempts and backoff per job type", "fail once, succeed on the second run", "background-jobs/retry"),
    ("missing-retention", "medium", "BullMQ keeps every finished job forever: Redis fills up",
     "removeOnComplete by count and age, removeOnFail by age", "run 10,000 jobs: DBSIZE stays bounded", "background-jobs/retention"),
    ("remove-on-fail-count", "high", "failed jobs kept by count: a burst evicts failures nobody has seen",
     "removeOnFail: {age: 14 days} and a dead-letter sweep", "1,000 failures: 1,000 dead letters", "background-jobs/dead-letter"),
    ("group-key", "high", "limiter.groupKey does not exist in open-source BullMQ: one tenant starves the others",
     "a token bucket per tenant as a guard", "a light tenant's wait beside a heavy one stays within twice its own",
     "background-jobs/rate-limit"),
    ("colon-job-id", "medium", "ids with one ':' or only digits throw in Node; Python overwrites digits by a number of its own, and `1:logs` is a key of job 1",
     "prefix and portable alphabet: name.key", "add twice from Node and Python: one job", "async-flow/job-ids"),
    ("listener-dead-letter", "critical", "a `failed` listener loses the job when the process dies in between; async ones never run in Python",
     "sweep the failed set into a table", "SIGKILL between failure and copy: the letter is there", "background-jobs/dead-letter"),
    ("attempts-made-filter", "high", "`attemptsMade >= attempts` misses unrecoverable and stalled-out jobs",
     "sweep the failed set, whatever the cause", "one job per cause: all are letters", "background-jobs/dead-letter"),
    ("no-shutdown", "high", "no SIGTERM handling: running jobs wait for their locks to run out and count as stalled",
     "stop taking, finish within a grace, give the rest back, exit 0", "20 SIGTERMs mid-job: no stalled event", "background-jobs/shutdown"),
    ("no-deadline", "medium", "no time limit around the work: hung jobs hold every slot, with their locks renewed",
     "a deadline that cancels or kills the work", "two hung jobs in two slots: the other 20 run", "background-jobs/deadline"),
    ("stall-default", "medium", "maxStalledCount 1: two crashes fail a job whose attempts are unspent",
     "lift it, and count crashes where the job is judged", "1,000 jobs, 20 SIGKILLs: none failed", "background-jobs/stall-budget"),
    ("redis-default-timeout", "high", "a plain connection hangs producers for minutes when Redis is down; redis-py 8's 5 s socket timeout makes idle workers deaf",
     "own clients: fail-fast for producers, socket_timeout 30 for blocking reads", "stop Redis: add fails in < 2 s; idle 60 s: a job starts at once",
     "background-jobs/bullmq-worker"),
    ("publish-in-transaction", "critical", "queue or broker called inside a database transaction: ghosts on rollback, jobs that run before the commit",
     "outbox row in the transaction, relay after it", "roll back after the call: nothing was published", "event-driven/outbox"),
    ("payload-logged", "high", "the payload in a log: addresses, tokens and card numbers leak",
     "one redacted line with ids and outcome", "grep the output for a planted token", "background-jobs/observability"),
    ("inner-retry", "medium", "a retry loop inside a job that has attempts multiplies the calls",
     "raise; the queue decides", "a dead provider sees `attempts` calls, not their square", "background-jobs/retry"),
    ("gather-fan-out", "high", "several queues in one gather/Promise.all: one rejects, the retry doubles the others",
     "one outbox row per queue in the transaction", "one queue down, three tries: one job in each", "event-driven/fan-out"),
    ("stream-no-ack", "critical", "entries of the group are never acknowledged: all of them come again after a restart, memory grows",
     "XACK after the effect", "restart: nothing is delivered twice", "event-driven/event-bus"),
    ("stream-no-claim", "high", "nobody takes over the pending entries of a dead consumer",
     "XAUTOCLAIM with a delivery count and quarantine", "SIGKILL a consumer: its entries are handled", "event-driven/event-bus"),
    ("stream-group-at-end", "high", "a group created at `$` never sees what was published before",
     "create it at 0", "publish, then subscribe: delivered", "event-driven/event-bus"),
    ("stream-maxlen", "medium", "MAXLEN drops entries a slow group has not read",
     "trim by the slowest group", "stop a consumer, publish past the limit: nothing lost", "event-driven/event-bus"),
    ("blocking-in-async", "high", "a blocking call stops the event loop: locks expire, every job of the process stalls",
     "async client, thread or subprocess", "a 10 ms ticker never gaps more than a quarter of the lock", "background-jobs/isolation"),
    ("wait-without-ttl", "medium", "waitUntilFinished without a ttl hangs forever when the event is missed",
     "ttl, state check first, poll as a fallback", "attach late: still resolved", "async-flow/wait-for-result"),
    ("acks-early", "high", "Celery acknowledges before the work by default: a crash loses it",
     "task_acks_late and task_reject_on_worker_lost, with idempotent tasks", "SIGKILL mid-task: it runs again", "background-jobs/choosing"),
)  # fmt: skip


class Project:
    """What has to be known about all files before one is judged."""

    def __init__(self, files: Iterable[Path], requirements: str = "") -> None:
        self.python = {path: path.read_text(errors="replace") for path in files if path.suffix == ".py"}
        self.scripts = {
            path: _masked(path.read_text(errors="replace")) for path in files if path.suffix in SCRIPTS
        }
        everything = "\n".join(self.python.values())
        self.python_stops = re.search(r"add_signal_handler|signal\.signal\(|run_until_signalled", everything)
        self.scripts_stop = any(
            re.search(r"process\.(on|once)\(\s*['\"]SIGTERM", text) for text in self.scripts.values()
        )
        self.acks_late = "acks_late" in everything
        # Before version 8 redis-py had no default socket timeout.
        self.old_redis = (
            re.search(r"\bredis(\[[^\]]*\])?['\"]?\s*(==|~=|<=?|:)\s*['\"=]*[2-7](\.|\b)", requirements)
            is not None
        )


# ---- Python


def python_findings(path: Path, source: str, project: Project) -> Iterator[tuple[str, int]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    look = _Python(source, tree, project)
    yield from look.findings()


class _Python:
    def __init__(self, source: str, tree: ast.Module, project: Project) -> None:
        self.source, self.tree, self.project = source, tree, project
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.functions = {
            n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.bullmq = bool(re.search(r"^\s*(from|import)\s+bullmq\b", source, re.MULTILINE))
        self.queues = self._made_by("Queue")
        self.workers = self._made_by("Worker") if self.bullmq else {}
        self.default_options = "defaultJobOptions" in source
        self._reads_blocking = (
            re.search(r"\bblock\s*=|\.(brpop|blpop|bzpopmin|bzpopmax)\(", source) is not None
        )

    def findings(self) -> Iterator[tuple[str, int]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self._call(node)
            elif isinstance(node, ast.While):
                yield from self._loop(node)
            elif isinstance(node, ast.For) and self.bullmq:
                yield from self._retry_loop(node)
            elif isinstance(node, ast.Expr) and _name(getattr(node.value, "func", None)).endswith(
                ("create_task", "ensure_future")
            ):
                call = node.value
                assert isinstance(call, ast.Call)
                receiver = _name(call.func).rpartition(".")[0]
                if receiver in (
                    "asyncio",
                    "loop",
                    "asyncio.get_event_loop()",
                    "asyncio.get_running_loop()",
                    "",
                ):
                    yield "task-not-held", node.lineno
            elif isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "attemptsMade":
                if any(
                    isinstance(op, ast.GtE | ast.Gt | ast.Eq) for op in node.ops
                ) and "attempts" in ast.unparse(node.comparators[0]):
                    yield "attempts-made-filter", node.lineno
            elif isinstance(node, ast.JoinedStr):
                yield from self._key(node)
        yield from self._workers()
        if "xreadgroup" in self.source:
            yield from self._streams()

    def _call(self, node: ast.Call) -> Iterator[tuple[str, int]]:
        name = _name(node.func)
        receiver, _, method = name.rpartition(".")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if method in ("set", "setnx") and (method == "setnx" or _true(keywords.get("nx"))):
            yield from self._set_nx(node)
        if method == "add" and self._is_queue(receiver) and len(node.args) >= 2:
            yield from self._add(node)
        if (method == "on" or name == "on") and node.args and _text(node.args[0]) == "failed":
            yield from self._listener(node)
        if _logs(name) and any(
            _is_payload(part) for argument in [*node.args, *keywords.values()] for part in ast.walk(argument)
        ):
            yield "payload-logged", node.lineno
        if method == "gather" and sum(self._enqueues(argument) for argument in node.args) >= 2:
            yield "gather-fan-out", node.lineno
        if self._enqueues(node) and self._in_transaction(node):
            yield "publish-in-transaction", node.lineno
        if name in (
            "time.sleep",
            "requests.get",
            "requests.post",
            "requests.put",
            "requests.request",
        ) and self._in_async(node):
            yield "blocking-in-async", node.lineno
        if (
            _text(keywords.get("idempotency_key")) is None
            and ast.unparse(keywords.get("idempotency_key") or ast.Constant("")) == "job.id"
        ):
            yield "job-id-as-key", node.lineno
        if name.endswith("Celery") and not self.project.acks_late:
            yield "acks-early", node.lineno
        if (
            self._reads_blocking
            and re.search(r"(^|\.)(Redis|StrictRedis|from_url)$", name)
            and "socket_timeout" not in keywords
        ):
            if (
                re.search(r"redis", name, re.IGNORECASE)
                and None not in keywords
                and not self.project.old_redis
            ):
                yield "redis-default-timeout", node.lineno
        if method == "xadd" and "maxlen" in keywords:
            yield "stream-maxlen", node.lineno
        if method == "xgroup_create" and any(
            _text(value) == "$" for value in [*node.args, *keywords.values()]
        ):
            yield "stream-group-at-end", node.lineno

    def _set_nx(self, node: ast.Call) -> Iterator[tuple[str, int]]:
        function = self._function(node)
        body = ast.unparse(function) if function else self.source
        if re.search(r"\.(eval|evalsha|register_script)\(|compare|fence", body):
            return  # compares a token before it deletes
        if re.search(r"\.(delete|unlink)\(", body) and re.search(
            r"lock|cron|lease|leader", body, re.IGNORECASE
        ):
            yield "lock-without-token", node.lineno
        elif function is not None and (
            len(function.body) > 1 or not isinstance(function.body[0], ast.Return)
        ):
            yield "set-nx-idempotency", node.lineno
        elif re.search(r"dup|seen|processed|idem|once", body, re.IGNORECASE):
            yield "set-nx-idempotency", node.lineno

    def _add(self, node: ast.Call) -> Iterator[tuple[str, int]]:
        options = (
            node.args[2]
            if len(node.args) > 2
            else next((k.value for k in node.keywords if k.arg == "opts"), None)
        )
        if options is not None and not isinstance(options, ast.Dict):
            return  # built elsewhere: not ours to guess
        if isinstance(options, ast.Dict) and None in options.keys:
            return  # **defaults
        keys = _keys(options)
        if not self.default_options:
            if "attempts" not in keys:
                yield "missing-attempts", node.lineno
            if not {"removeOnComplete", "removeOnFail"} & set(keys):
                yield "missing-retention", node.lineno
        if "repeat" in keys:
            yield "repeat-option", keys["repeat"].lineno
        if _evicts(keys.get("removeOnFail")):
            yield "remove-on-fail-count", keys["removeOnFail"].lineno
        ident = keys.get("jobId")
        if ident is not None and _odd_id(ident):
            yield "colon-job-id", ident.lineno

    def _listener(self, node: ast.Call) -> Iterator[tuple[str, int]]:
        handler = node.args[1] if len(node.args) > 1 else None
        found = self.functions.get(getattr(handler, "id", "")) if isinstance(handler, ast.Name) else handler
        if found is None:
            return
        body = ast.unparse(found)
        if isinstance(found, ast.AsyncFunctionDef) or re.search(
            r"\.(add|insert|execute|enqueue|rpush|xadd)\(", body
        ):
            yield "listener-dead-letter", node.lineno

    def _key(self, node: ast.JoinedStr) -> Iterator[tuple[str, int]]:
        parts = "".join(_text(value) or "" for value in node.values)
        used = {ast.unparse(value.value) for value in node.values if isinstance(value, ast.FormattedValue)}
        if "job.id" in used and re.search(r"processed|dedup|idem|seen|done|once", parts):
            yield "job-id-as-key", node.lineno

    def _loop(self, node: ast.While) -> Iterator[tuple[str, int]]:
        if not (isinstance(node.test, ast.Constant) and node.test.value) or not self._in_async(node):
            return
        own = [part for statement in node.body for part in ast.walk(statement)]
        if any(isinstance(part, ast.Break | ast.Return) for part in own):
            return  # waits for something: a poll, not a timer
        blocks = r"\b(xread|xreadgroup|brpop|blpop|bzpopmin|receive|recv)|\.get\(\)"
        for part in own:
            if (
                isinstance(part, ast.Call)
                and _name(part.func) == "asyncio.sleep"
                and self._fixed_pause(part.args)
            ):
                if not re.search(blocks, ast.unparse(node)):
                    yield "interval-loop", node.lineno
                return

    def _fixed_pause(self, arguments: list[ast.expr]) -> bool:
        """Five seconds or more, written down: a computed pause is a backoff or a heartbeat."""
        pause = arguments[0] if arguments else None
        if isinstance(pause, ast.Name):
            pause = next(
                (
                    n.value
                    for n in self.tree.body
                    if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == pause.id
                ),
                None,
            )
        if pause is None or any(
            isinstance(part, ast.Call | ast.Attribute | ast.Name) for part in ast.walk(pause)
        ):
            return False
        numbers = [part.value for part in ast.walk(pause) if isinstance(part, ast.Constant)]
        return bool(numbers) and all(isinstance(n, int | float) for n in numbers) and max(numbers) >= 5

    def _retry_loop(self, node: ast.For) -> Iterator[tuple[str, int]]:
        text = ast.unparse(node)
        if (
            text.startswith("for ")
            and " in range(" in text.splitlines()[0]
            and "except" in text
            and "asyncio.sleep(" in text
        ):
            yield "inner-retry", node.lineno

    def _workers(self) -> Iterator[tuple[str, int]]:
        for call in self.queues.values() if self.bullmq else ():
            options = call.args[1] if len(call.args) > 1 else None
            connection = _keys(options).get("connection")
            if len(call.args) == 1 or isinstance(connection, ast.Constant | ast.JoinedStr):
                yield "redis-default-timeout", call.lineno
        for call in self.workers.values():
            if not self.project.python_stops:
                yield "no-shutdown", call.lineno
            options = (
                call.args[2]
                if len(call.args) > 2
                else next((k.value for k in call.keywords if k.arg == "opts"), None)
            )
            keys = _keys(options) if isinstance(options, ast.Dict) else {}
            if options is None or (isinstance(options, ast.Dict) and None not in options.keys):
                if "maxStalledCount" not in keys:
                    yield "stall-default", call.lineno
                connection = keys.get("connection")
                if connection is None or isinstance(connection, ast.Constant | ast.JoinedStr):
                    yield "redis-default-timeout", call.lineno
                elif isinstance(connection, ast.Dict) and "socket_timeout" not in _keys(connection):
                    yield "redis-default-timeout", call.lineno
            limiter = keys.get("limiter")
            if isinstance(limiter, ast.Dict) and "groupKey" in _keys(limiter):
                yield "group-key", limiter.lineno
            processor = self.functions.get(getattr(call.args[1], "id", "")) if len(call.args) > 1 else None
            if processor is not None and not re.search(
                r"timeout|wait_for|run_within|deadline", ast.unparse(processor)
            ):
                yield "no-deadline", processor.lineno

    def _streams(self) -> Iterator[tuple[str, int]]:
        line = next(i for i, text in enumerate(self.source.splitlines(), 1) if "xreadgroup" in text)
        if not re.search(r"xack|noack\s*=\s*True", self.source):
            yield "stream-no-ack", line
        if not re.search(r"xautoclaim|xclaim", self.source):
            yield "stream-no-claim", line

    # -- what is what

    def _made_by(self, kind: str) -> dict[str, ast.Call]:
        made = {}
        for node in ast.walk(self.tree):
            value = getattr(node, "value", None)
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and isinstance(value, ast.Call)
                and _name(value.func).split(".")[-1] == kind
            ):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                made[ast.unparse(target)] = value
        return made

    def _is_queue(self, receiver: str) -> bool:
        return self.bullmq and (
            receiver in self.queues
            or receiver.rsplit(".", maxsplit=1)[-1].lower().rstrip("_").endswith("queue")
        )

    def _enqueues(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        receiver, _, method = _name(node.func).rpartition(".")
        if method == "add":
            return self._is_queue(receiver)
        if method in ("enqueue", "publish", "xadd", "apply_async", "send_task", "enqueue_job"):
            return receiver != "" and not re.search(r"outbox|inbox|pending", receiver)
        return method == "delay" and len(node.args) > 0

    def _in_transaction(self, node: ast.AST) -> bool:
        for parent in self._above(node):
            if isinstance(parent, ast.With | ast.AsyncWith):
                for item in parent.items:
                    opened = ast.unparse(item.context_expr)
                    if re.search(r"(\.|^)(begin|transaction|atomic|begin_nested)\(", opened):
                        return True
        return False

    def _in_async(self, node: ast.AST) -> bool:
        return isinstance(self._function(node), ast.AsyncFunctionDef)

    def _function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        return next(
            (p for p in self._above(node) if isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef)), None
        )

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (found := self.parents.get(node)) is not None:
            yield found
            if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                return
            node = found


def _name(node: ast.AST | None) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _keys(node: ast.AST | None) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    return {
        text: value
        for key, value in zip(node.keys, node.values, strict=True)
        if (text := _text(key)) is not None
    }


def _evicts(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is True or (isinstance(node.value, int) and node.value is not False)
    return isinstance(node, ast.Dict) and "count" in _keys(node)


def _odd_id(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        return any(":" in (_text(value) or "") for value in node.values)
    text = _text(node)
    return text is not None and (":" in text or text.isdigit())


def _logs(name: str) -> bool:
    receiver, _, method = name.rpartition(".")
    if name == "print":
        return True
    levels = ("debug", "info", "warning", "error", "exception", "critical", "log")
    return method in levels and re.search(r"log|logger|logging", receiver, re.IGNORECASE) is not None


def _is_payload(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "data"
        and ast.unparse(node.value) in ("job", "self.job", "event", "message")
    )


# ---- TypeScript and JavaScript


def script_findings(path: Path, text: str, project: Project) -> Iterator[tuple[str, int]]:
    """`text` has its comments blanked out."""
    bullmq = re.search(r"from\s+['\"]bullmq['\"]|require\(\s*['\"]bullmq['\"]", text) is not None
    defaults = "defaultJobOptions" in text

    def at(match: re.Match[str], group: int | str = 0) -> int:
        return text.count("\n", 0, match.start(group)) + 1

    browser = re.search(r"\b(document|window)\.", text) is not None  # its timers are nobody else's
    for match in re.finditer(r"\bsetInterval\s*\(", text) if not browser else ():
        yield "interval-loop", at(match)
    for match in re.finditer(r"\.set\s*\(", text):
        call = text[match.start() : _closing(text, match.end() - 1)]
        if re.search(r"['\"]NX['\"]|\bNX\s*:\s*true", call):
            around = text[match.start() : match.start() + 900]
            locks = re.search(
                r"lock|cron|leader", text[max(0, match.start() - 400) : match.start() + 200], re.IGNORECASE
            )
            if re.search(r"\.eval\s*\(|redlock", around, re.IGNORECASE):
                continue
            yield (
                (
                    "lock-without-token"
                    if locks and re.search(r"\.del\s*\(", around)
                    else "set-nx-idempotency"
                ),
                at(match),
            )
    for match in re.finditer(r"attemptsMade\s*(>=|===?|>)\s*[^;\n]*attempts", text):
        yield "attempts-made-filter", at(match)
    for match in re.finditer(r"\.on\s*\(\s*['\"]failed['\"]", text):
        handler = text[match.start() : _closing(text, text.index("(", match.start()))]
        if re.search(r"\.(add|insert|create|save|rpush|xadd|xAdd)\s*\(", handler):
            yield "listener-dead-letter", at(match)
    for match in re.finditer(
        r"(?:console|log|logger|jobLog|\w*[lL]og)\.(?:log|debug|info|warn|error)\s*\(", text
    ):
        if re.search(r"\bjob\??\.data\b(?!\s*\.)", text[match.start() : _closing(text, match.end() - 1)]):
            yield "payload-logged", at(match)
    for match in re.finditer(r"Promise\.all\s*\(", text):
        if (
            len(
                re.findall(
                    r"\.(?:add|publish|xAdd)\s*\(", text[match.start() : _closing(text, match.end() - 1)]
                )
            )
            >= 2
        ):
            yield "gather-fan-out", at(match)
    for match in re.finditer(r"(?:\$transaction|\.transaction)\s*\(", text):
        inside = text[match.end() : _closing(text, match.end() - 1)]
        for call in re.finditer(r"\b(\w+)\.(?:add|publish|xAdd|xadd)\s*\(", inside):
            if re.search(r"queue|bus|publisher|redis|producer", call[1], re.IGNORECASE):
                yield "publish-in-transaction", text.count("\n", 0, match.end() + call.start()) + 1
    for match in re.finditer(r"waitUntilFinished\s*\(", text):
        if "," not in text[match.end() : _closing(text, match.end() - 1)]:
            yield "wait-without-ttl", at(match)
    if re.search(r"xReadGroup|xreadgroup", text):
        first = re.search(r"xReadGroup|xreadgroup", text)
        assert first is not None
        if not re.search(r"xAck|xack", text):
            yield "stream-no-ack", at(first)
        if not re.search(r"xAutoClaim|xautoclaim|xClaim|xclaim", text):
            yield "stream-no-claim", at(first)
    if bullmq:
        yield from _bullmq_findings(text, project, defaults)


def _bullmq_findings(text: str, project: Project, defaults: bool) -> Iterator[tuple[str, int]]:
    def line(position: int) -> int:
        return text.count("\n", 0, position) + 1

    for match in re.finditer(r"\b(?:\w*[qQ]ueue\w*)\.add\s*\(", text):
        call = text[match.end() - 1 : _closing(text, match.end() - 1)]
        arguments = _arguments(call)
        options = arguments[2] if len(arguments) > 2 else ""
        if (options and not options.startswith("{")) or "..." in options:
            continue  # built elsewhere
        if not defaults:
            if "attempts" not in options:
                yield "missing-attempts", line(match.start())
            if "removeOn" not in options:
                yield "missing-retention", line(match.start())
        if ident := re.search(r"jobId\s*:\s*([`'\"])(.*?)\1", options):
            if ":" in re.sub(r"\$\{[^}]*\}", "", ident[2]) or ident[2].isdigit():
                yield "colon-job-id", line(match.end() + call.index("jobId") - 1)
    for match in re.finditer(r"\brepeat\s*:\s*\{", text):
        yield "repeat-option", line(match.start())
    for match in re.finditer(r"\bgroupKey\s*:", text):
        yield "group-key", line(match.start())
    for match in re.finditer(r"removeOnFail\s*:\s*(true|\d+|\{[^}]*\bcount\b[^}]*\})", text):
        yield "remove-on-fail-count", line(match.start())
    for match in re.finditer(r"new\s+Worker\s*(?:<[^>]*>)?\s*\(", text):
        call = text[match.end() - 1 : _closing(text, match.end() - 1)]
        if not project.scripts_stop:
            yield "no-shutdown", line(match.start())
        if "maxStalledCount" not in call and not re.search(r",\s*\w*[oO]pt\w*\s*\)$", call):
            yield "stall-default", line(match.start())


def _masked(text: str) -> str:
    """Comments as spaces; strings and line numbers stay."""
    keep = r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"|`(?:\\.|[^`\\])*`"
    blank = r"//[^\n]*|/\*.*?\*/"

    def change(match: re.Match[str]) -> str:
        found = match[0]
        if found.startswith(("//", "/*")) and "queuesmith: ignore" not in found:
            return re.sub(r"[^\n]", " ", found)
        return found

    return re.sub(f"{keep}|{blank}", change, text, flags=re.DOTALL)


def _closing(text: str, opening: int) -> int:
    """Position after the bracket that closes the one at `opening`; strings are skipped."""
    depth, position = 0, opening
    while position < len(text):
        char = text[position]
        if char in "'\"`":
            end = position + 1
            while end < len(text) and text[end] != char:
                end += 2 if text[end] == "\\" else 1
            position = end
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return len(text)


def _arguments(call: str) -> list[str]:
    """The top-level arguments of `(…)`."""
    parts, depth, start, position = [], 0, 1, 0
    while position < len(call):
        char = call[position]
        if char in "'\"`":
            end = position + 1
            while end < len(call) and call[end] != char:
                end += 2 if call[end] == "\\" else 1
            position = end
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 1:
            parts.append(call[start:position].strip())
            start = position + 1
        position += 1
    last = call[start:-1].strip()
    return [*parts, last] if last else parts


# ---- all of it


def files_in(paths: Iterable[Path], include_tests: bool) -> Iterator[Path]:
    for path in paths:
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in found:
            inside = file.relative_to(path) if path.is_dir() else Path(file.name)
            if (
                file.suffix not in SCRIPTS | {".py"}
                or SKIPPED & set(inside.parts)
                or file.name.endswith((".d.ts", ".min.js"))
            ):
                continue
            if path.is_dir() and not include_tests and TESTS.search(inside.as_posix()):
                continue
            if file.is_file() and file.stat().st_size < 1_000_000:
                yield file


def _requirements(paths: Iterable[Path]) -> str:
    named = [
        file
        for path in paths
        if path.is_dir()
        for name in ("requirements*.txt", "pyproject.toml")
        for file in path.glob(name)
    ]
    return "\n".join(file.read_text(errors="replace") for file in named)


def review(paths: Iterable[Path], include_tests: bool = False) -> list[Finding]:
    """All findings, the worst first."""
    paths = list(paths)
    project = Project(list(files_in(paths, include_tests)), _requirements(paths))
    found: list[Finding] = []
    for path, text in [*project.python.items(), *project.scripts.items()]:
        look = python_findings if path.suffix == ".py" else script_findings
        lines = text.splitlines()
        for rule, line in sorted(set(look(path, text, project)), key=lambda item: item[1]):
            shown = [lines[i - 1] for i in (line - 1, line) if 0 < i <= len(lines)]
            if any(re.search(rf"queuesmith: ignore\[[^\]]*\b{re.escape(rule)}\b", text) for text in shown):
                continue
            about = RULES[rule]
            code = lines[line - 1].strip()[:120] if line <= len(lines) else ""
            found.append(
                Finding(
                    rule, about.severity, str(path), line, code, about.why, about.fix, about.proof, about.page
                )
            )
    return sorted(found, key=lambda item: (SEVERITIES.index(item.severity), item.file, item.line))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path()], help="files or folders (default: here)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--fail-on", choices=SEVERITIES, default="high", help="exit 1 from this severity on")
    parser.add_argument("--include-tests", action="store_true", help="look at test code too")
    parser.add_argument("--list-rules", action="store_true", help="print what is looked for")
    options = parser.parse_args(argv)
    if options.list_rules:
        for rule in RULES.values():
            print(f"{rule.severity:8}  {rule.id:24}  {rule.why}")
        return 0
    missing = [str(path) for path in options.paths if not path.exists()]
    if missing:
        print(f"no such file or folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    findings = review(options.paths, options.include_tests)
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.severity}: {finding.file}:{finding.line}: {finding.rule}\n    {finding.code}")
            print(
                f"    why    {finding.why}\n    fix    {finding.fix} ({finding.page})\n    prove  {finding.proof}\n"
            )
        counts = ", ".join(f"{sum(f.severity == s for f in findings)} {s}" for s in SEVERITIES)
        print(f"{len(findings)} findings: {counts}")
    worst = SEVERITIES.index(options.fail_on)
    return 1 if any(SEVERITIES.index(finding.severity) <= worst for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
