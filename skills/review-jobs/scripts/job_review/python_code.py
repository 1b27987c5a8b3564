"""Python code of jobs, whatever the queue: keys, locks, timers, errors, retries, calls, logs, payloads."""

import ast
import re
from collections.abc import Iterator

from .python_tree import BROAD, Tree, is_constant, keywords, logs, name, text_of
from .rules import Hit
from .text import KEYED, SECRET, THROTTLE, plain_inserts, replaced_rows

VERBS = ("get", "post", "put", "patch", "delete", "head", "request")
BLOCKING = re.compile(
    r"time\.sleep|requests\.(get|post|put|patch|delete|head|request)|(urllib\.request\.)?urlopen|subprocess\.(run|call|check_call|check_output)"
    r"|psycopg2\.connect|pymysql\.connect|smtplib\.SMTP(_SSL)?|httpx\.(get|post|put|patch|delete|request)"
)
# A model of a database: `Payment(…)`, `Payment.objects.create(…)`.
ROW = re.compile(r"\.objects\.\w*create$|^(?:\w+\.)?[A-Z]\w*(?<!Request)(?<!Params)(?<!Options)$")
RANDOM = re.compile(
    r"\buuid[14]\(|token_hex\(|token_urlsafe\(|random\.|time\.time\(|\bnow\(\)|\butcnow\(\)|\bulid|\bnanoid"
)
KEY = re.compile(r"idempotency[_-]?key|Idempotency-Key|request_id_key", re.IGNORECASE)
PERMANENT = re.compile(
    r"Unrecoverable|Permanent|Reject\b|Ignore\b|dont_autoretry_for|status_code\s*(<|>|==|in\b|//)|\.status\s*(<|>|==|in\b|//)|is_client_error|throws="
)
ORM = re.compile(
    r"\.objects\.(get|create|first)|\.query\.|session\.(get|scalar|scalars|query|merge)\(|get_object_or_404|fetch(one|row)\(|\.scalar_one\("
)


def findings(tree: Tree) -> Iterator[Hit]:
    for node in tree.nodes:
        if isinstance(node, ast.Call):
            yield from _call(tree, node)
        elif isinstance(node, ast.While):
            yield from _timer(tree, node)
            yield from _retry_loop(tree, node)
        elif isinstance(node, ast.For):
            yield from _retry_loop(tree, node)
        elif isinstance(node, ast.Expr):
            yield from _loose_task(node)
        elif isinstance(node, ast.JoinedStr):
            yield from _key_text(node)
        elif isinstance(node, ast.Dict):
            yield from _key_header(tree, node)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and not isinstance(tree.parents.get(node), ast.Expr)
        ):
            for line in replaced_rows(node.value):
                yield "replace-effect-row", node.lineno + line - 1
            # Passed on by the handler, it runs where others decide: in the transaction of a marker, say.
            if tree.function(node) in tree.reached and not KEYED.search(tree.source):
                for _ in plain_inserts(node.value):
                    yield "insert-without-marker", node.lineno
        elif isinstance(node, ast.ExceptHandler):
            yield from _swallowed(tree, node)
    yield from _nested_retries(tree)
    yield from _client_errors(tree)
    yield from _stop_handlers(tree)


def _call(tree: Tree, call: ast.Call) -> Iterator[Hit]:
    called, given = name(call.func), keywords(call)
    method = called.rpartition(".")[2]
    if method in ("set", "setnx") and (method == "setnx" or is_constant(given.get("nx"), True)):
        yield from _set_nx(tree, call)
    if logs(called):
        yield from _log(call)
    if BLOCKING.fullmatch(called) and tree.in_async(call):
        yield "blocking-in-async", call.lineno
    if _endless(tree, call, called, given):
        yield "http-no-timeout", call.lineno
    for argument, value in given.items():
        if argument and KEY.fullmatch(argument):
            yield from _key(tree, call, value)
    if tree.enqueues(call):
        sent = call.args[1:2] if method == "add" else [*call.args, *given.values()]
        if any(_row(tree, call, value) for value in sent):
            yield "row-in-payload", call.lineno


# ---- keys and locks


def _set_nx(tree: Tree, call: ast.Call) -> Iterator[Hit]:
    function = tree.function(call)
    body = ast.unparse(function) if function else tree.source
    if THROTTLE.search(ast.unparse(call)):
        return
    if re.search(r"\.(eval|evalsha|register_script)\(|compare|fence", body):
        return  # compares a token before it deletes
    if re.search(r"\.(delete|unlink)\(", body) and re.search(r"lock|cron|lease|leader", body, re.IGNORECASE):
        yield "lock-without-token", call.lineno
    elif function is not None and (len(function.body) > 1 or not isinstance(function.body[0], ast.Return)):
        yield "set-nx-idempotency", call.lineno
    elif re.search(r"dup|seen|processed|idem|once", body, re.IGNORECASE):
        yield "set-nx-idempotency", call.lineno


def _key(tree: Tree, where: ast.AST, value: ast.expr) -> Iterator[Hit]:
    """`value` is what the provider gets as its key."""
    if isinstance(value, ast.Name) and (function := tree.function(where)):
        value = next(
            (
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id
            ),
            value,
        )
    text = ast.unparse(value)
    if re.search(r"\b(job\.id|self\.request\.id|current_message\(?\)?\.message_id|task_id)\b", text):
        yield "job-id-as-key", where.lineno  # type: ignore[attr-defined]
    elif (
        RANDOM.search(text)
        and not any(tree.enqueues(parent) for parent in tree.above(where))
        and not (isinstance(where, ast.Call) and ROW.search(name(where.func)))
    ):
        # A key made with the job, in its payload, or stored in a row, is the same in every try.
        yield "key-per-try", where.lineno  # type: ignore[attr-defined]


def _key_header(tree: Tree, node: ast.Dict) -> Iterator[Hit]:
    for key, value in zip(node.keys, node.values, strict=True):
        if (text := text_of(key)) is not None and KEY.fullmatch(text):
            for rule, _ in _key(tree, value, value):
                yield rule, value.lineno


def _key_text(node: ast.JoinedStr) -> Iterator[Hit]:
    parts = "".join(text_of(value) or "" for value in node.values)
    used = {ast.unparse(value.value) for value in node.values if isinstance(value, ast.FormattedValue)}
    if "job.id" in used and re.search(r"processed|dedup|idem|seen|done|once", parts):
        yield "job-id-as-key", node.lineno


# ---- timers and tasks


def _timer(tree: Tree, node: ast.While) -> Iterator[Hit]:
    if not (isinstance(node.test, ast.Constant) and node.test.value):
        return
    pauses = ("asyncio.sleep",) if tree.in_async(node) else ("time.sleep",) if tree.uses else ()
    own = [part for statement in node.body for part in ast.walk(statement)]
    if any(isinstance(part, ast.Break | ast.Return) for part in own):
        return  # waits for something: a poll, not a timer
    blocks = r"\b(xread|xreadgroup|brpop|blpop|bzpopmin|receive|recv|receive_message|poll)|\.get\(\)"
    for part in own:
        if isinstance(part, ast.Call) and name(part.func) in pauses and _fixed_pause(tree, part.args):
            # `schedule.every(…)` is reported at its own line.
            if not re.search(blocks, ast.unparse(node)) and "run_pending" not in ast.unparse(node):
                yield "interval-loop", node.lineno
            return


def _fixed_pause(tree: Tree, arguments: list[ast.expr]) -> bool:
    """Five seconds or more, written down: a computed pause is a backoff or a heartbeat."""
    pause = arguments[0] if arguments else None
    if isinstance(pause, ast.Name):
        pause = next(
            (n.value for n in tree.tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == pause.id),
            None,
        )
    if pause is None or any(isinstance(p, ast.Call | ast.Attribute | ast.Name) for p in ast.walk(pause)):
        return False
    numbers = [part.value for part in ast.walk(pause) if isinstance(part, ast.Constant)]
    return bool(numbers) and all(isinstance(n, int | float) for n in numbers) and max(numbers) >= 5


def _loose_task(node: ast.Expr) -> Iterator[Hit]:
    called = name(node.value.func) if isinstance(node.value, ast.Call) else ""
    receiver, _, method = called.rpartition(".")
    if method in ("create_task", "ensure_future") and receiver in ("asyncio", "loop", ""):
        yield "task-not-held", node.lineno
    elif isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        if node.value.func.attr == "create_task" and re.match(
            r"asyncio\.get_\w*loop\(\)", ast.unparse(node.value.func)
        ):
            yield "task-not-held", node.lineno


# ---- errors and retries


def _swallowed(tree: Tree, handler: ast.ExceptHandler) -> Iterator[Hit]:
    function = tree.function(handler)
    caught = ast.unparse(handler.type) if handler.type else ""
    if function not in tree.jobs or caught.split(".")[-1] not in BROAD:
        return
    loop = next((p for p in tree.above(handler) if isinstance(p, ast.For | ast.While)), None)
    if loop is not None and "sleep(" in ast.unparse(loop):
        return  # a retry loop: found as such
    attempted = tree.parents[handler]
    if isinstance(attempted, ast.Try) and function is not None and attempted.finalbody and not handler.body:
        return
    for statement in handler.body:
        for part in ast.walk(statement):
            # Raised, or returned to whoever waits for the result.
            error = rf"['\"]error|^return {handler.name or '-'}$"
            reported = isinstance(part, ast.Return) and re.search(error, ast.unparse(part))
            if isinstance(part, ast.Raise) or reported:
                return
            if isinstance(part, ast.Call):
                called = ast.unparse(part.func)
                harmless = (
                    r"capture_exception|print_exc|^(str|repr|type|getattr|dict)$|format|^(self\.)?_?log(ger|ging)?\."
                )
                if not logs(called) and not re.search(harmless, called):
                    return  # it handles the error
            if isinstance(part, ast.Assign | ast.AugAssign):
                return  # kept for later
    yield "swallowed-error", handler.lineno


def _retry_loop(tree: Tree, node: ast.For | ast.While) -> Iterator[Hit]:
    function = tree.function(node)
    text = ast.unparse(node)
    counted = isinstance(node, ast.For) and " in range(" in text.splitlines()[0]
    # `for _ in range(3): answer = requests.post(…); if answer.ok: break`
    calls = re.search(rf"\b(requests|httpx|http|client|session)\.({'|'.join(VERBS)})\(", text)
    repeats = counted and calls and re.match(r"for (_|\w*(attempt|tr[yi]|retr)\w*) in", text)
    if repeats and re.search(r"\b(break|return)\b", text) and function in tree.reached:
        yield "inner-retry", node.lineno
        return
    if "except" not in text or not re.search(r"(asyncio|time)\.sleep\(", text):
        return
    until = isinstance(node, ast.While) and re.search(r"attempt|tries|retr", text.splitlines()[0])
    in_job = tree.bullmq or (function in tree.reached)
    if in_job and (
        counted
        or until
        or (isinstance(node, ast.While) and function in tree.jobs and re.search(r"\b(return|break)\b", text))
    ):
        yield "inner-retry", node.lineno


def _nested_retries(tree: Tree) -> Iterator[Hit]:
    if not tree.jobs:
        return
    for function in tree.reached:
        for decorator in function.decorator_list:
            if re.match(
                r"(tenacity\.)?retry\b|stamina\.retry|backoff\.on_(exception|predicate)", ast.unparse(decorator)
            ):
                yield "inner-retry", decorator.lineno
    for call in tree.calls:
        called, given = name(call.func).rpartition(".")[2], keywords(call)
        if called in ("HTTPAdapter", "HTTPTransport", "AsyncHTTPTransport"):
            if retries := given.get("max_retries", given.get("retries")):
                if not is_constant(retries, 0):
                    yield "inner-retry", call.lineno
        forced = given.get("status_forcelist")
        if isinstance(forced, ast.List | ast.Tuple | ast.Set):
            codes = [e.value for e in forced.elts if isinstance(e, ast.Constant) and isinstance(e.value, int)]
            if any(400 <= code < 500 and code not in (408, 409, 425, 429) for code in codes):
                yield "retried-4xx", call.lineno


def _client_errors(tree: Tree) -> Iterator[Hit]:
    """raise_for_status in a job, and nothing in the file about which status is worth a retry."""
    if PERMANENT.search(tree.source):
        return
    for function in tree.reached:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "raise_for_status":
                if tree.function(node) is function:
                    yield "retried-4xx", node.lineno


def _stop_handlers(tree: Tree) -> Iterator[Hit]:
    handlers: set[ast.AST] = {
        f
        for f in tree.functions.values()
        if re.search(r"sigterm|shutdown|on_stop|graceful|on_exit", f.name, re.IGNORECASE)
    }
    for call in tree.calls:
        if name(call.func).rpartition(".")[2] in ("signal", "add_signal_handler") and len(call.args) > 1:
            handler = call.args[1]
            handlers.add(tree.functions.get(name(handler), handler))
    for handler in handlers:
        for node in ast.walk(handler):
            if tree.enqueues(node):
                yield "readd-on-stop", node.lineno  # type: ignore[attr-defined]


# ---- calls, logs, payloads


def _endless(tree: Tree, call: ast.Call, called: str, given: dict[str | None, ast.expr]) -> bool:
    if not tree.about_jobs:
        return False
    receiver, _, method = called.rpartition(".")
    if is_constant(given.get("timeout"), None):
        return receiver.split(".")[0] in ("requests", "httpx", "aiohttp") or (
            method in VERBS and bool(re.search("http|client|session", receiver))
        )
    if None in given:
        return False
    if method in VERBS and (receiver == "requests" or receiver in tree.sessions):
        return "timeout" not in given
    return (
        called in ("urlopen", "urllib.request.urlopen", "request.urlopen")
        and "timeout" not in given
        and len(call.args) < 3
    )


def _log(call: ast.Call) -> Iterator[Hit]:
    for part in _shown([*call.args, *(keyword.value for keyword in call.keywords)]):
        if isinstance(part, ast.Attribute) and part.attr == "data":
            if ast.unparse(part.value) in ("job", "self.job", "event", "message"):
                yield "payload-logged", call.lineno
        named = (
            part.attr if isinstance(part, ast.Attribute)
            else part.id if isinstance(part, ast.Name)
            else text_of(part.slice) if isinstance(part, ast.Subscript)
            else None
        )  # fmt: skip
        if named and re.fullmatch(SECRET, named, re.IGNORECASE):
            yield "secret-logged", call.lineno


def _shown(values: list[ast.expr]) -> Iterator[ast.AST]:
    """What ends up in the text: `len(password)` and `redact(email)` do not show it."""
    todo: list[ast.AST] = list(values)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.Call) and not re.search(
            r"^(str|repr|dict)$|\.(format|get|join)$|^json\.dumps$", name(node.func)
        ):
            continue
        if isinstance(node, ast.Call) and name(node.func).endswith(".get") and node.args:
            if re.fullmatch(SECRET, text_of(node.args[0]) or "", re.IGNORECASE):
                yield ast.Name(id=text_of(node.args[0]) or "")
        if isinstance(node, ast.Attribute | ast.Subscript):
            continue  # `user.email.domain` and `job.data["id"]` show the last of them
        if isinstance(node, ast.Compare | ast.IfExp):
            todo += [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
            continue
        todo += ast.iter_child_nodes(node)


def _row(tree: Tree, call: ast.Call, value: ast.expr) -> bool:
    text = ast.unparse(value)
    if re.search(r"\b\w+\.__dict__\b|\bvars\(\w+\)|\._mapping\b|\._asdict\(\)|model_to_dict\(|\bdict\(row\)", text):
        return True
    if match := re.search(r"\b(\w+)\.to_dict\(\)", text):
        own = r"payload|job|data|message|event|command|task|envelope|context|trace|telemetry|meta|header"
        return not re.search(own, match[1])
    function = tree.function(call)
    if not isinstance(value, ast.Name) or function is None:
        return False
    return any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == value.id
        and ORM.search(ast.unparse(node.value))
        for node in ast.walk(function)
    )
