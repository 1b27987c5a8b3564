"""A Python file as a tree: what calls what, in which function, transaction and job."""

import ast
import re
from collections.abc import Iterator
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
TASK = re.compile(r"(^|\.)(task|shared_task|actor|job|periodic_task|db_task|subscriber|agent|cron)(\(|$)")
TRANSACTION = re.compile(r"(\.|^)(begin|transaction|atomic|begin_nested)\(")
BROAD = {"", "Exception", "BaseException"}


class Tree:
    def __init__(self, source: str, tree: ast.Module, uses: set[str]) -> None:
        self.source, self.tree, self.uses = source, tree, uses
        _undo_aliases(tree)
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.nodes = list(ast.walk(tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.functions = {node.name: node for node in self.nodes if isinstance(node, Function)}
        self.bullmq = "BullMQ" in uses

    @cached_property
    def about_jobs(self) -> bool:
        return bool(self.uses or re.search(r"redis|queue|job|worker", self.source, re.IGNORECASE))

    @cached_property
    def sessions(self) -> set[str]:
        """Names of sessions of `requests`."""
        if "requests" not in self.source:
            return set()
        opened = {
            ast.unparse(item.optional_vars)
            for node in self.nodes
            if isinstance(node, ast.With)
            for item in node.items
            if item.optional_vars is not None and ast.unparse(item.context_expr).startswith("requests.Session")
        }
        return opened | {
            variable
            for variable, call in self.made_by("Session").items()
            if name(call.func) in ("requests.Session", "Session")
        }

    @cached_property
    def _tasks(self) -> set[Function]:
        return {f for f in self.functions.values() if any(TASK.search(ast.unparse(d)) for d in f.decorator_list)}

    @cached_property
    def jobs(self) -> set[Function]:
        """Functions that a queue or a broker calls."""
        result = set(self._tasks)
        for node in self.functions.values():
            first = next((a.arg for a in node.args.args if a.arg not in ("self", "cls")), "")
            if self.uses and (
                first == "job"
                or ("arq" in self.uses and first == "ctx")
                or re.match(r"(handle|process|consume|on_message|callback|perform)(_|$)", node.name)
            ):
                result.add(node)
        for call in self.calls:
            kind = name(call.func).rsplit(".", maxsplit=1)[-1]
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if kind.endswith("Worker") or kind in ("basic_consume", "consume", "enqueue", "subscribe"):
                result |= {self.functions[a.id] for a in given if isinstance(a, ast.Name) and a.id in self.functions}
        return result

    @cached_property
    def reached(self) -> set[Function]:
        """Jobs, and the functions of this file that they call."""
        reached, todo = set(self.jobs), list(self.jobs)
        while todo:
            for node in ast.walk(todo.pop()):
                if isinstance(node, ast.Call):
                    called = self.functions.get(name(node.func).rsplit(".", maxsplit=1)[-1])
                    if called is not None and called not in reached:
                        reached.add(called)
                        todo.append(called)
        return reached

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Up to the function around."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            if isinstance(parent, Function | ast.Lambda):
                return
            node = parent

    def function(self, node: ast.AST) -> Function | None:
        return next((p for p in self.above(node) if isinstance(p, Function)), None)

    def in_async(self, node: ast.AST) -> bool:
        return isinstance(self.function(node), ast.AsyncFunctionDef)

    def made_by(self, kind: str) -> dict[str, ast.Call]:
        """variable: call, for `variable = kind(…)`"""
        made = {}
        for node in self.nodes:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Await):
                value = value.value
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and isinstance(value, ast.Call)
                and name(value.func).split(".")[-1] == kind
            ):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                made[ast.unparse(target)] = value
        return made

    @cached_property
    def queues(self) -> dict[str, ast.Call]:
        return self.made_by("Queue")

    def is_queue(self, receiver: str) -> bool:
        return self.bullmq and (
            receiver in self.queues or receiver.rsplit(".", maxsplit=1)[-1].lower().rstrip("_").endswith("queue")
        )

    def enqueues(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        receiver, _, method = name(node.func).rpartition(".")
        if method in ("add", "addBulk"):
            return self.is_queue(receiver)
        if method in (
            "enqueue",
            "publish",
            "basic_publish",
            "xadd",
            "apply_async",
            "send_task",
            "enqueue_job",
            "kiq",
            "send_and_wait",
            "produce",
            "send_message",
        ):
            return receiver != "" and not re.search(r"outbox|inbox|pending", receiver)
        if method == "send" and self.functions.get(receiver) in self._tasks:
            return True
        if method == "send":
            return bool(self.uses & {"dramatiq", "Kafka"}) and not re.search(r"outbox|mail|smtp|http", receiver)
        return method == "delay" and receiver != "" and bool(self.uses & {"Celery", "RQ"} or node.args)

    def in_transaction(self, node: ast.AST) -> bool:
        for parent in self.above(node):
            if isinstance(parent, ast.With | ast.AsyncWith):
                for item in parent.items:
                    opened = ast.unparse(item.context_expr)
                    if re.search(r"using=[^,)]*(replica|read)", opened, re.IGNORECASE):
                        continue  # nothing is written there
                    if TRANSACTION.search(opened) or re.fullmatch(
                        r"(self\.)?_?(db|conn|connection|con|database)", opened
                    ):
                        return True
            if isinstance(parent, Function) and any(
                re.search(r"(^|\.)atomic(\(|$)", ast.unparse(d)) for d in parent.decorator_list
            ):
                return True
        return self._before_commit(node)

    def _before_commit(self, node: ast.AST) -> bool:
        """A write above it and a commit below it, in the same block."""
        block = next((p for p in self.above(node) if isinstance(p, Function)), None)
        if block is None:
            return False
        own = [part for part in ast.walk(block) if isinstance(part, ast.Call) and self.function(part) is block]
        at = getattr(node, "lineno", 0)
        commits = {name(c.func).rpartition(".")[0] for c in own if name(c.func).endswith(".commit") and c.lineno > at}
        # What an earlier commit ended is no longer open.
        since = max((c.lineno for c in own if name(c.func).endswith(".commit") and c.lineno < at), default=0)
        return any(
            since < c.lineno < at and receiver in commits and method in ("add", "add_all", "execute", "flush", "delete", "merge", "executemany")
            for c in own
            for receiver, _, method in [name(c.func).rpartition(".")]
        )  # fmt: skip


def _undo_aliases(tree: ast.Module) -> None:
    """`import requests as http`: the rules know the names of the libraries."""
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname and "." not in alias.name
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in aliases:
            node.id = aliases[node.id]


def name(node: ast.AST | None) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def text_of(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def keys(node: ast.AST | None) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    return {
        text: value for key, value in zip(node.keys, node.values, strict=True) if (text := text_of(key)) is not None
    }


def keywords(node: ast.Call) -> dict[str | None, ast.expr]:
    return {keyword.arg: keyword.value for keyword in node.keywords}


def logs(called: str) -> bool:
    receiver, _, method = called.rpartition(".")
    if called == "print":
        return True
    levels = ("debug", "info", "warning", "error", "exception", "critical", "log")
    return method in levels and re.search(r"log|logger|logging", receiver, re.IGNORECASE) is not None
