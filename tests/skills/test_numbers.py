"""Numbers in the texts: what was measured stands in a generated region, all else is a setting of the code."""

import ast
import functools
import re

import pytest

from queuesmith.catalogue import MODULES, ROOT, patterns

TEXTS = sorted(
    path
    for pattern in (
        "README.md",
        "*/README.md",
        "templates/common/README.md",
        "skills/**/*.md",
        "agents/*.md",
        "guide/pages/*.md",
        "guide/*.toml",
    )
    for path in ROOT.glob(pattern)
)
# Not measured, and not of our making. Each has to be found, so that none outlives its text.
GIVEN = {
    "skills/async-flow/SKILL.md": {"3 seconds", "3 s", "15 min"},  # what chat platforms give
    "skills/async-flow/references/deferred-reply.md": {"3 seconds", "15 minutes"},
    "skills/async-flow/references/recipes/chat-reply.md": {"3 seconds"},
    # Defaults of other people's queues, and what the prove.toml of a stack promises.
    "skills/background-jobs/references/stacks/asynq.md": {"30 s", "90 days", "up to a second"},
    "skills/background-jobs/references/stacks/bullmq-ts.md": {"30 s"},
    "skills/background-jobs/references/stacks/arq.md": {"10 s"},
    "skills/background-jobs/references/stacks/dramatiq.md": {"7 days", "15 s", "10 minutes"},
    "skills/background-jobs/references/stacks/taskiq.md": {"10 minutes"},
    "skills/background-jobs/references/delayed.md": {"95 of 100"},  # the promise, as its proof asks for it
    "skills/background-jobs/references/progress.md": {"100 %"},
    "skills/background-jobs/references/prove-it.md": {"1.95 s", "2.40 s", "2.41 s", "9.80 s"},  # a report
    "skills/event-driven/references/event-bus.md": {"5 s"},  # redis-py's default
    "guide/pages/calculators.md": {"100 ms"},  # a model, not a machine
    "guide/pages/operations.md": {"70 %", "100 bytes"},  # advice; what the bench gives each job
    "guide/decisions.toml": {"3 seconds"},  # what chat platforms give
    "guide/pages/errors.md": {"5 s"},  # redis-py's default
    "guide/sentences.toml": {"3 s", "100 ms"},  # what chat platforms give; how the experiment sets its clocks
    "guide/timelines.toml": {"about a minute", "10 s", "15 s"},  # BullMQ's defaults; a story
    "bench/README.md": {"32 bytes"},  # the record's size
}
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86_400}
BYTES = {"bytes": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}
UNIT = r"µs|ms|min|seconds?|minutes?|hours?|days?|s|h|KB|MB|GB|bytes|%|×|times|(?:jobs|events|calls|adds)/s"
FIGURE = re.compile(
    rf"(?<![\w.,])(?P<number>\d[\d,]*(?:\.\d+)?) ?(?P<unit>{UNIT})(?![\w/-])|(?<![\w.,])\d[\d,]* of \d[\d,]*\b"
    r"|(?:over|about|nearly|almost|half|most of|up to) an? (?:second|minute|hour)\b"
)
NOT_PROSE = (
    r"<!-- sync:.*?<!-- /sync -->",
    r"^\*\*(?:Get it|Measured)[^\n]*$",  # generated, on a pattern's page
    r"^```.*?^```",
    r"^\*\*Prove it\.\*\*.*?\n\n",  # an experiment to make
    r"Show: [^\n]*",
    r"`[^`\n]+`",
    r"\{\{.*?\}\}",  # a figure, in the guide
    r"\{@.*?@\}",
    r"^(?:proof|twin|  +- ).*?$",  # names of tests
)


def figures_in(path):
    text = path.read_text()
    for what in NOT_PROSE:
        text = re.sub(what, lambda cut: "\n" * cut[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    return [(number, match) for number, line in enumerate(text.splitlines(), 1) for match in FIGURE.finditer(line)]


def is_setting(path, figure):
    """A constant or default of the pattern's own modules, or a bound in the asserts or the name of one of its
    proofs."""
    entry = patterns().get(path.stem)
    if entry is None or entry.page != path or not figure["unit"]:
        return False
    number, unit = float(figure["number"].replace(",", "")), figure["unit"]
    scale = SECONDS.get(unit) or SECONDS.get(unit.removesuffix("s")) or BYTES.get(unit)
    if scale is None:
        return False
    known = set[float]().union(*(settings(MODULES / name) for name in (*entry.modules, *entry.parts)))
    for file in entry.proof_files:
        known |= bounds(ROOT / file)
    return any(abs(number * scale - value) < 1e-9 for value in known)


@functools.cache
def settings(path):
    numbers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Module() | ast.ClassDef():
                values = [line.value for line in node.body if isinstance(line, ast.Assign | ast.AnnAssign)]
            case ast.arguments():
                values = [*node.defaults, *node.kw_defaults]
            case _:
                continue
        numbers |= {value for default in values if default and (value := folded(default)) is not None}
    return numbers


@functools.cache
def bounds(path):
    numbers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                if isinstance(part, ast.expr) and (value := folded(part)) is not None:
                    numbers |= {value, value / 1000}  # in seconds, or in ms
        elif isinstance(node, ast.Module):  # BACK = 20.0
            constants = [line.value for line in node.body if isinstance(line, ast.Assign)]
            numbers |= {value for constant in constants if (value := folded(constant)) is not None}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            numbers |= {float(number) for number in re.findall(r"_(\d+)_seconds", node.name)}
    return numbers


def folded(node):
    """The value of a number, or of a product of numbers."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(id="DAY"):
            return 86_400.0
        case ast.BinOp(op=ast.Mult() | ast.Pow()):
            left, right = folded(node.left), folded(node.right)
            if left is not None and right is not None:
                return left**right if isinstance(node.op, ast.Pow) else left * right
    return None


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_number_is_generated_or_a_setting_of_the_code(path):
    """ "4.5 KB", "over a second" and "over 100 KB" were written by hand, and were 2.5 KB, 775 ms and 64 KB."""
    given = GIVEN.get(str(path.relative_to(ROOT)), set())
    figures = figures_in(path)
    wrong = [
        f"line {line}: {figure[0]}"
        for line, figure in figures
        if figure[0] not in given and not is_setting(path, figure)
    ]
    assert not wrong, (
        f"{wrong}: a measurement belongs in a sentence of the card (guide/sentences.toml), a setting "
        "in backticks as the code spells it"
    )
    assert given <= {figure[0] for _, figure in figures}, "no longer in the text: take it out of GIVEN"
