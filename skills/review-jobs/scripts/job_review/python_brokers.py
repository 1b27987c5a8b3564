"""Python: Redis Streams, Kafka, RabbitMQ, Celery, APScheduler, and sends inside transactions."""

import ast
import re
from collections.abc import Iterator

from .project import Project
from .python_tree import Tree, is_constant, keys, keywords, name, text_of
from .rules import Hit

SCHEDULERS = re.compile(r"(^|\.)(Background|Blocking|AsyncIO|Async|Tornado|Twisted|Gevent|Qt)?Scheduler$")
# A row per slot, or a lock in the database, decides which of the processes acts.
SLOTTED = re.compile(r"\bslots?\b|ON CONFLICT|advisory_lock|redlock", re.IGNORECASE)


def findings(tree: Tree, project: Project) -> Iterator[Hit]:
    reads_blocking = re.search(r"\bblock\s*=|\.(brpop|blpop|bzpopmin|bzpopmax)\(", tree.source) is not None
    for call in tree.calls:
        called, given = name(call.func), keywords(call)
        method = called.rpartition(".")[2]
        if tree.enqueues(call) and tree.in_transaction(call):
            yield "publish-in-transaction", call.lineno
        if method == "gather" and sum(tree.enqueues(argument) for argument in call.args) >= 2:
            yield "gather-fan-out", call.lineno
        if called.endswith("Celery") and "Celery" in tree.uses and not project.acks_late:
            yield "acks-early", call.lineno
        if reads_blocking and not project.old_redis and re.search(r"(^|\.)(Redis|StrictRedis|from_url)$", called):
            if re.search("redis", called, re.IGNORECASE) and not {"socket_timeout", None} & set(given):
                yield "redis-default-timeout", call.lineno
        if method == "xadd" and "maxlen" in given:
            yield "stream-maxlen", call.lineno
        if method == "xgroup_create" and any(text_of(v) == "$" for v in [*call.args, *given.values()]):
            yield "stream-group-at-end", call.lineno
        if "Kafka" in tree.uses and _auto_commits(tree, call):
            yield "kafka-auto-commit", call.lineno
        if is_constant(given.get("auto_ack"), True) or is_constant(given.get("no_ack"), True):
            yield "rabbit-auto-ack", call.lineno
        if _schedules(tree, called):
            yield "scheduler-per-process", call.lineno
    yield from _streams(tree)


def _auto_commits(tree: Tree, call: ast.Call) -> bool:
    kind = name(call.func).rpartition(".")[2]
    given = keywords(call)
    if kind in ("KafkaConsumer", "AIOKafkaConsumer"):
        grouped = "group_id" in given and not is_constant(given["group_id"], None)
        return (
            grouped
            and None not in given
            and ("enable_auto_commit" not in given or is_constant(given["enable_auto_commit"], True))
        )
    if kind == "Consumer" and call.args:
        config = call.args[0]
        if isinstance(config, ast.Name):
            made = next(
                (n for n in tree.nodes if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == config.id), None
            )
            config = made.value if made else config
        options = keys(config)
        stored = options.get("enable.auto.offset.store")
        commits = options.get("enable.auto.commit")
        if not options or is_constant(stored, False):
            return False
        return commits is None or is_constant(commits, True) or text_of(commits) == "true"
    return False


def _schedules(tree: Tree, called: str) -> bool:
    if "APScheduler" in tree.uses and SCHEDULERS.search(called):
        return not SLOTTED.search(tree.source)
    if "schedule" in tree.uses and called == "schedule.every":
        return not SLOTTED.search(tree.source)
    return called in ("threading.Timer",) and bool(tree.uses)


def _streams(tree: Tree) -> Iterator[Hit]:
    line = min((call.lineno for call in tree.calls if getattr(call.func, "attr", "") == "xreadgroup"), default=None)
    if line is None:
        return
    if not re.search(r"xack|noack\s*=\s*True", tree.source):
        yield "stream-no-ack", line
    if not re.search(r"xautoclaim|xclaim", tree.source):
        yield "stream-no-claim", line
