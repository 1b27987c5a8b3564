"""What a pattern costs: how many modules, how many lines, which packages; and which layer it is in.

`pytest tests/test_closures.py -s -k table` prints the table.
"""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from harness.processes import ROOT
from queuesmith import catalogue
from queuesmith.catalogue import MODULES

MOST_MODULES, MOST_LINES = 8, 1_200
SHORT_INIT = 8  # lines: an __init__ that only names what the package offers is not counted

# Patterns above the budget: how many modules and lines they may have, and why.
ABOVE: dict[str, tuple[int, int, str]] = {
    "bullmq-worker": (
        12,
        2_180,
        "a whole worker: fetching, locks, outcomes, one pipelined connection, the server's clock",
    ),
    "event-bus": (11, 1_840, "the consumer of Redis Streams with its scripts, beside the common part"),
    "fan-out": (10, 1_350, "the way in through the outbox, and the consumer's side with its retries"),
    "outbox": (
        13,
        1_960,
        "the table, its claims and where they begin, the relay, the quarantine and the wake-up of PostgreSQL",
    ),
    "saga": (16, 2_935, "the runner, its course by the rules of outside-call, its store and what repairs it"),
    "schedule": (13, 1_980, "the calendar, the keeper, what was missed, and the lease that keeps ticks apart"),
}
PRODUCER = 600  # lines; what makes an add one round trip, in the protocol itself, is half its cost

# Who may import packages that are heavy, slow to import or not for everybody.
HEAVY = {
    "prometheus_client": {"observability/metrics.py"},
    "opentelemetry": {"tracing.py"},
    "psycopg": {"outbox/wakeup.py", "core/open_store.py", "outside_call/command.py"},
    "pydantic": {"claim_check.py", "core/event.py", "event_schema.py", "typed_jobs.py"},
    "sqlalchemy": {
        "cancel.py",
        "checkpoint.py",
        "core/open_store.py",
        "core/store.py",
        "dead_letter/archive.py",
        "dead_letter/replayer.py",
        "dead_letter/sweeper.py",
        "dead_letter/sweeping.py",
        "deferred_reply/replies.py",
        "degraded/pending.py",
        "degraded/producer.py",
        "fan_out.py",
        "health/alerts.py",
        "idempotency/markers.py",
        "idempotency/once.py",
        "inbox.py",
        "lease.py",
        "outbox/claims.py",
        "outbox/quarantine.py",
        "outbox/relay.py",
        "outbox/table.py",
        "outbox/wakeup.py",
        "outside_call/store.py",
        "replay.py",
        "request_dedup.py",
        "saga/definition.py",
        "saga/repair.py",
        "saga/runner.py",
        "saga/store.py",
        "schedule/history.py",
        "schedule/keeper.py",
    },
}
COMPOSITIONS = {"pipeline.py", "producer.py"}  # they bring patterns together, so no pattern needs them

PATTERNS = list(catalogue.patterns().values())
EVERY = sorted(path.relative_to(MODULES).as_posix() for path in MODULES.rglob("*.py"))


@cache
def lines(module):
    return len((MODULES / module).read_text().splitlines())


def counted(pattern):
    return [name for name in pattern.modules if not (name.endswith("__init__.py") and lines(name) <= SHORT_INIT)]


def size(pattern):
    names = counted(pattern)
    return len(names), sum(map(lines, names))


def test_table_of_what_every_pattern_brings_along():
    print(f"\n{'pattern':<18} modules  lines  packages")
    for pattern in sorted(PATTERNS, key=size, reverse=True):
        modules, length = size(pattern)
        mark = "*" if pattern.id in ABOVE else " "
        packages = ", ".join(catalogue.packages(pattern.modules)) or "none"
        print(f"{pattern.id:<18} {modules:>6}{mark} {length:>6}  {packages}")


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.id)
def test_pattern_stays_within_its_budget(pattern):
    most_modules, most_lines, _ = ABOVE.get(pattern.id, (MOST_MODULES, MOST_LINES, ""))
    modules, length = size(pattern)
    brought = " ".join(f"{name}:{lines(name)}" for name in counted(pattern))
    assert modules <= most_modules, brought
    assert length <= most_lines, brought


def test_no_exception_is_kept_that_is_not_needed():
    sizes = {ident: size(catalogue.find(ident)) for ident in ABOVE}
    needless = [ident for ident, (modules, length) in sizes.items() if modules <= MOST_MODULES and length <= MOST_LINES]
    assert needless == [], "within the budget now: strike them out"


def test_the_way_into_the_queue_is_short():
    assert size(catalogue.find("producer"))[1] <= PRODUCER


# ---- layers


@pytest.mark.parametrize("module", [name for name in EVERY if name.startswith("core/")])
def test_the_core_imports_no_pattern(module):
    outside = {name for name in catalogue.imports(module)[0] if not name.startswith("core/")}
    assert outside <= {"__init__.py"}


@pytest.mark.parametrize("module", [name for name in EVERY if name not in COMPOSITIONS])
def test_no_pattern_imports_a_composition(module):
    assert not COMPOSITIONS & catalogue.imports(module)[0]


@pytest.mark.parametrize("package", HEAVY)
def test_heavy_packages_are_imported_only_where_allowed(package):
    users = {module for module in EVERY if package in catalogue.imports(module)[1]}
    assert users == HEAVY[package]


@pytest.mark.parametrize(
    ("module", "not_loaded"),
    {
        "patterns.observability": ("prometheus_client", "opentelemetry", "pydantic", "sqlalchemy"),
        "patterns.pipeline": ("prometheus_client", "opentelemetry", "sqlalchemy", "bullmq"),
        "patterns.retry": ("prometheus_client", "opentelemetry", "pydantic", "sqlalchemy", "redis"),
        "patterns.event_bus": ("nats", "aio_pika", "confluent_kafka", "sqlalchemy"),
        "patterns.dead_letter.command": ("redis", "bullmq", "pydantic", "sqlalchemy.dialects.postgresql"),
        "patterns.outbox.command": ("redis", "bullmq", "pydantic"),
        "patterns.outside_call.command": ("redis", "sqlalchemy", "pydantic"),
    }.items(),
)
def test_importing_a_pattern_loads_only_what_it_needs(module, not_loaded):
    code = f"import sys, studyhall.{module}; print(*(name for name in {not_loaded!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "reference")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# ---- names

SHARED = {"NotSigned"}  # the same thing, in two patterns that come alone


def test_a_class_has_a_name_of_its_own():
    """One word, one thing: `Step` or `Lease` is the same in every module."""
    classes, others = Counter[str](), set()
    for path in (ROOT / "reference" / "studyhall").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                classes[node.name] += 1
            elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):  # a TypeVar is not a type
                others |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert {name for name, count in classes.items() if count > 1 or name in others} == SHARED


# ---- options


def unread(module):
    """Parameters of public functions and methods that their body does not read, and fields of public dataclasses that
    nothing of ours reads; a field counts wherever it is read."""
    tree = ast.parse((MODULES / module).read_text())
    names = []
    for owner, function in _functions(tree.body):
        args = function.args
        wanted = {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)} - {"self", "cls"}
        body = [node for statement in function.body for node in ast.walk(statement)]
        if _is_stub(function):
            continue
        read = {node.id for node in body if isinstance(node, ast.Name)}
        names += [f"{owner}{function.name}({name})" for name in sorted(wanted - read) if name[0] != "_"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_" and "dataclass" in _decorators(node):
            fields = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign) and _is_name(field)]
            names += [f"{node.name}.{name}" for name in fields if name[0] != "_" and name not in _attributes()]
    return names


def _functions(body, owner=""):
    public = []
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            public += _functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            node.name[0] != "_" or node.name in ("__init__", "__call__")
        ):
            public.append((owner, node))
    return public


def _is_stub(function):
    """In a Protocol, or an overload: no body of its own."""
    last = function.body[-1]
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)


def _is_name(node):
    return isinstance(node.target, ast.Name)


def _decorators(node):
    return " ".join(ast.unparse(mark) for mark in node.decorator_list)


@cache
def _attributes():
    """Every attribute that is read, and every keyword that is passed, somewhere in our code."""
    names = set()
    for path in (*(ROOT / "reference").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names.add(node.value)  # getattr(self, "markers_age")
    return frozenset(names)


# What an interface asks for and an implementation has no use for, and what only people read.
UNUSED = {
    "core/clock.py": {"Periodic.drain(grace)"},
    "degraded/pending.py": {"Drained.postponed"},
    "outbox/relay.py": {"Relay.drain(grace)"},
}


@pytest.mark.slow
@pytest.mark.parametrize("module", EVERY)
def test_every_option_is_read(module):
    """An option that nothing reads is a promise that nothing keeps."""
    assert set(unread(module)) == UNUSED.get(module, set())


def test_a_part_names_the_packages_of_what_it_imports_and_sync_calls_need_no_store():
    gate, calls = catalogue.find("pipeline"), catalogue.find("outside-call")
    assert any(name.startswith("sqlalchemy") for name in gate.needed_for("store_gate.py"))
    assert calls.needed_for("outside_call/command.py") == []
    assert "core/store.py" not in catalogue.find("outside-call.command").modules
