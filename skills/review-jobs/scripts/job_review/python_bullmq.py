"""BullMQ in Python: jobs added, workers, priorities, health."""

import ast
import re
from collections.abc import Iterator

from .project import Project
from .python_tree import Tree, keys, keywords, name, text_of
from .rules import Hit
from .text import MANY

URGENT = re.compile(r"urgent|high|critical|vip|premium", re.IGNORECASE)
RELAXED = re.compile(r"low|bulk|batch|background|normal|default|free", re.IGNORECASE)


def findings(tree: Tree, project: Project) -> Iterator[Hit]:
    for call in tree.calls:
        receiver, _, method = name(call.func).rpartition(".")
        if method == "add" and tree.is_queue(receiver) and len(call.args) >= 2:
            yield from _add(tree, call)
        if (method or name(call.func)) == "on" and call.args and text_of(call.args[0]) == "failed":
            yield from _listener(tree, call)
    for node in tree.nodes:
        if isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "attemptsMade":
            if any(isinstance(op, ast.GtE | ast.Gt | ast.Eq) for op in node.ops):
                if "attempts" in ast.unparse(node.comparators[0]):
                    yield "attempts-made-filter", node.lineno
        elif isinstance(node, ast.Dict) and tree.bullmq and _evicts(keys(node).get("removeOnFail")):
            yield "remove-on-fail-count", keys(node)["removeOnFail"].lineno
    if tree.bullmq:
        yield from _clients(tree)
        yield from _workers(tree, project)
        yield from _priorities(tree)
        yield from _health(tree)


def _add(tree: Tree, call: ast.Call) -> Iterator[Hit]:
    options = call.args[2] if len(call.args) > 2 else keywords(call).get("opts")
    if options is not None and not isinstance(options, ast.Dict):
        return  # built elsewhere: not ours to guess
    if isinstance(options, ast.Dict) and None in options.keys:
        return  # **defaults
    given = keys(options)
    if "defaultJobOptions" not in tree.source:
        if "attempts" not in given:
            yield "missing-attempts", call.lineno
        if not {"removeOnComplete", "removeOnFail"} & set(given):
            yield "missing-retention", call.lineno
    if given and not {"jobId", "deduplication", "repeat"} & set(given) and keys(call.args[1]):
        yield "add-without-id", call.lineno
    if "repeat" in given:
        yield "repeat-option", given["repeat"].lineno
    if "jobId" in given and _odd_id(given["jobId"]):
        yield "colon-job-id", given["jobId"].lineno


def _evicts(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) and node.value is not False and node.value < MANY
    return isinstance(node, ast.Dict) and _evicts(keys(node).get("count"))


def _odd_id(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        return any(":" in (text_of(value) or "") for value in node.values)
    text = text_of(node)
    return text is not None and (":" in text or text.isdigit())


def _listener(tree: Tree, call: ast.Call) -> Iterator[Hit]:
    handler = call.args[1] if len(call.args) > 1 else None
    function = tree.functions.get(handler.id) if isinstance(handler, ast.Name) else handler
    if function is None:
        return
    writes = re.search(r"\.(add|insert|execute|enqueue|rpush|xadd)\(", ast.unparse(function))
    if isinstance(function, ast.AsyncFunctionDef) or writes:
        yield "listener-dead-letter", call.lineno


def _clients(tree: Tree) -> Iterator[Hit]:
    for call in tree.queues.values():
        options = call.args[1] if len(call.args) > 1 else keywords(call).get("opts")
        connection = keys(options).get("connection")
        if options is None or isinstance(connection, ast.Constant | ast.JoinedStr):
            yield "redis-default-timeout", call.lineno


def _workers(tree: Tree, project: Project) -> Iterator[Hit]:
    stock = re.search(
        r"^\s*from\s+bullmq(\.\w+)*\s+import\s+[^\n]*\bWorker\b|^\s*from\s+bullmq\s+import\s*\([^)]*\bWorker\b",
        tree.source,
        re.MULTILINE,
    )
    for call in tree.calls:
        called = name(call.func)
        if called.rsplit(".", maxsplit=1)[-1] != "Worker" or not (stock or called == "bullmq.Worker"):
            continue
        yield "stock-worker", call.lineno
        if not project.python_stops:
            yield "no-shutdown", call.lineno
        options = call.args[2] if len(call.args) > 2 else keywords(call).get("opts")
        given = keys(options)
        if options is None or (isinstance(options, ast.Dict) and None not in options.keys):
            if "maxStalledCount" not in given:
                yield "stall-default", call.lineno
            connection = given.get("connection")
            if connection is None or isinstance(connection, ast.Constant | ast.JoinedStr):
                yield "redis-default-timeout", call.lineno
            elif isinstance(connection, ast.Dict) and "socket_timeout" not in keys(connection):
                yield "redis-default-timeout", call.lineno
        limiter = given.get("limiter")
        if isinstance(limiter, ast.Dict) and "groupKey" in keys(limiter):
            yield "group-key", limiter.lineno
        processor = tree.functions.get(name(call.args[1])) if len(call.args) > 1 else None
        if processor is not None:
            if not re.search(r"timeout|wait_for|run_within|deadline", ast.unparse(processor)):
                yield "no-deadline", processor.lineno


def _priorities(tree: Tree) -> Iterator[Hit]:
    """A dict, an enum or constants in which the urgent have the larger number."""
    for node in tree.nodes:
        if isinstance(node, ast.Dict):
            holder = tree.parents.get(node)
            named = ast.unparse(
                getattr(holder, "targets", [None])[0] or getattr(holder, "target", None) or ast.Constant("")
            )
            if re.search("priorit", named, re.IGNORECASE) and _inverted(keys(node)):
                yield "inverted-priority", node.lineno
        elif isinstance(node, ast.ClassDef | ast.Module):
            if isinstance(node, ast.ClassDef) and not re.search("priorit", node.name, re.IGNORECASE):
                continue
            constants = {
                ast.unparse(part.targets[0]): part.value
                for part in node.body
                if isinstance(part, ast.Assign)
                and (
                    isinstance(node, ast.ClassDef) or re.search("priorit", ast.unparse(part.targets[0]), re.IGNORECASE)
                )
            }
            if _inverted(constants):
                yield "inverted-priority", next(iter(constants.values())).lineno
    for call in tree.calls:
        chosen = keys(call.args[2]).get("priority") if len(call.args) > 2 else None
        if isinstance(chosen, ast.IfExp) and URGENT.search(ast.unparse(chosen.test)):
            if _number(chosen.body) > _number(chosen.orelse) > 0:
                yield "inverted-priority", chosen.lineno


def _number(node: ast.AST) -> float:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else 0


def _inverted(named: dict[str, ast.expr]) -> bool:
    urgent = [_number(value) for key, value in named.items() if URGENT.search(key) and _number(value)]
    relaxed = [_number(value) for key, value in named.items() if RELAXED.search(key) and _number(value)]
    return bool(urgent and relaxed) and min(urgent) > min(relaxed)


def _health(tree: Tree) -> Iterator[Hit]:
    for function in tree.functions.values():
        body = ast.unparse(function)
        if not re.search(
            r"health|ready|depth|backlog|lag|probe|alive", function.name + (ast.get_docstring(function) or "")
        ):
            continue
        if re.search(r"prioritized|oldest", body, re.IGNORECASE):
            continue
        for node in ast.walk(function):
            called = name(node.func).rsplit(".", maxsplit=1)[-1] if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and (
                called in ("getWaitingCount", "getWaiting")
                or (called == "getJobCounts" and node.args)
                or (called == "llen" and re.search(r":wait\b", ast.unparse(node)))
            ):
                yield "partial-health", node.lineno
