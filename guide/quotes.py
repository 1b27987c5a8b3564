"""What the skill pages take from the code: quotes, guarantee cards, and what `queuesmith add` brings.

<!-- sync:quote reference/studyhall/patterns/retry.py#decide full_jitter -->   functions, classes, Class.method
<!-- sync:quote …/bullmq_worker/worker.py#ReliableWorker~ -->                  ~ : signatures and docstrings only
<!-- sync:quote tests/skills/examples/background-jobs/worker.py#[wiring] -->   from `# [wiring]` to `# [/wiring]`
<!-- sync:card -->            the promise, and what the last full fault run measured
<!-- sync:files -->           how to get the modules, which packages they need
"""

import ast
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from guide import cards
from queuesmith.catalogue import MODULES, ROOT, Pattern, closure, find, imports, module_of, packages, patterns

PROSE, CODE = 4, 3  # characters per token: an offline estimate that errs on the high side
PATTERNS = MODULES.relative_to(ROOT)
_FENCES = {".ts": "ts", ".go": "go", ".toml": "toml"}


# ---- quotes


def quote(args: str) -> str:
    """A fenced block with the named parts of a file, and where they are from."""
    path, _, names = args.partition("#")
    source = (ROOT / path).read_text()
    parts, spans = [], []
    for name in names.split() or [""]:
        text, first, last = _part(path, source, name)
        parts.append(text)
        spans.append(f"{first}–{last}" if first != last else f"{first}")
    # An example says nothing: it runs in the tests, and `patterns` is the package that the modules were copied to.
    where = ""
    if Path(path).is_relative_to(PATTERNS):
        where = f"Lines {', '.join(spans)} of `patterns/{Path(path).relative_to(PATTERNS)}`:"
    body = "\n\n\n".join(parts) if any("\n" in part for part in parts) else "\n".join(parts)
    if path.startswith("reference/stacks/"):
        body = body.replace("from studyhall.patterns", "from patterns")
        # where `queuesmith add` puts them
        body = re.sub(r"^from (celery_jobs|sqs_jobs|table_worker) import", r"from patterns.\1 import", body, flags=re.M)
    return f"{where}\n\n```{_FENCES.get(Path(path).suffix, 'python')}\n{body}\n```".lstrip()


def _part(path: str, source: str, name: str) -> tuple[str, int, int]:
    lines = source.splitlines()
    if not name:
        return source.rstrip(), 1, len(lines)
    if region := re.fullmatch(r"\[([\w-]+)\]", name):
        ends = {f"{sign} [{slash}{region[1]}]" for sign in ("#", "//") for slash in ("", "/")}
        marks = [i for i, line in enumerate(lines) if line.strip() in ends]
        if len(marks) != 2:
            raise SystemExit(f"{path}: needs the lines `# [{region[1]}]` and `# [/{region[1]}]` once each")
        first, last = marks[0] + 1, marks[1]
    else:
        node = _node(path, ast.parse(source).body, name.removesuffix("~").split("."))
        if name.endswith("~"):
            return textwrap.dedent(_outline(node, lines)), *_span(node)
        first, last = _span(node)[0] - 1, _span(node)[1]
    return textwrap.dedent("\n".join(lines[first:last])).strip("\n"), first + 1, last


def _node(path: str, body: list[ast.stmt], names: list[str]) -> ast.stmt:
    for node in body:
        found = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            found = getattr(node.targets[0], "id", None)
        elif isinstance(node, ast.AnnAssign):
            found = getattr(node.target, "id", None)
        if found == names[0]:
            return _node(path, getattr(node, "body", []), names[1:]) if names[1:] else node
    raise SystemExit(f"{path}: there is no {'.'.join(names)}")


def _span(node: ast.stmt) -> tuple[int, int]:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(mark.lineno for mark in decorators)]), node.end_lineno or node.lineno


def _outline(node: ast.stmt, lines: list[str]) -> str:
    """Signatures and docstrings of a class or function; public methods and `__init__` only."""
    if isinstance(node, ast.ClassDef):
        head = lines[_span(node)[0] - 1 : node.lineno]
        inner: list[str] = []
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if not child.name.startswith("_") or child.name in ("__init__", "__call__"):
                    inner += ["", _outline(child, lines)]
            elif _is_docstring(child) or (
                isinstance(child, ast.AnnAssign) and not getattr(child.target, "id", "_").startswith("_")
            ):
                inner += lines[child.lineno - 1 : child.end_lineno]
        return "\n".join([*head, *inner]) if inner else "\n".join([*head, "    ..."])
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first = node.body[0]
    until = first.end_lineno or first.lineno if _is_docstring(first) else first.lineno - 1
    while not _is_docstring(first) and lines[until - 1].strip().startswith("#"):
        until -= 1
    return "\n".join([*lines[_span(node)[0] - 1 : until], " " * (node.col_offset + 4) + "..."])


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# ---- the pattern of a page


def card(pattern: Pattern) -> str:
    return cards.card(pattern, brief=True)


def files(pattern: Pattern) -> str:
    """The command that brings all that the code on the page imports, what to install, and where the detail is."""
    more = _more(pattern)
    modules = closure([*pattern.own, *(name for one in more for name in one.own)])
    command = f"queuesmith add {' '.join(one.id for one in (pattern, *more))} --into src/app"
    text = f"**Get it**: `{command}`"
    if wanted := _requirements(modules):
        text += ". **Install** " + " ".join(f'`"{item}"`' for item in wanted)
    if parts := [_part_of(pattern, part) for part in pattern.parts]:
        text += f". Parts to add: {', '.join(parts)}"
    return f"{text}. Options and limits: the docstrings of `patterns/{pattern.own[0]}`."


def _part_of(pattern: Pattern, part: str) -> str:
    needs = " ".join(f'`"{item}"`' for item in pattern.needed_for(part))
    return f"`{pattern.id}.{PurePosixPath(part).stem}`{needs and f' ({needs})'}"


def imported(page: Path) -> set[str]:
    """The modules that the examples on this page import."""
    found = set()
    for args in re.findall(r"<!-- sync:quote (tests/skills/examples/[^\n]+?) -->", page.read_text()):
        code = re.search(r"```python\n(.*)\n```", quote(args), re.DOTALL)
        for node in ast.walk(ast.parse(code[1] if code else "")):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "patterns":
                base = str(node.module).split(".")[1:]
                found |= {module_of([*base, alias.name]) or module_of(base) or "" for alias in node.names}
    return found - {""}


def _more(pattern: Pattern) -> list[Pattern]:
    """Further patterns to add for the code on its page; those of the core last, most come along with the others."""
    result: list[Pattern] = []
    for module in sorted(imported(pattern.page), key=lambda name: (name.startswith("core/"), name)):
        if not any(module in one.modules for one in (pattern, *result)):
            result.append(_owner(module))
    return result


def _owner(module: str) -> Pattern:
    """The pattern whose module it is, or most of whose package; else the smallest that brings it along."""
    name = module.removesuffix("__init__.py")

    def fits(one: Pattern) -> tuple[int, int]:
        return sum(own.startswith(name) for own in one.own), -len(one.modules)

    parts = [
        find(f"{pattern.id}.{PurePosixPath(part).stem}") for pattern in patterns().values() for part in pattern.parts
    ]
    # A part only for what is in it: it brings the rest of its package along too.
    for some in (patterns().values(), parts):
        if found := [one for one in some if module in one.modules and fits(one)[0]]:
            return max(found, key=fits)
    return max((pattern for pattern in patterns().values() if module in pattern.modules), key=fits)


def _requirements(names: Iterable[str]) -> list[str]:
    """What to install for these modules; the driver of PostgreSQL where one of them can use it."""
    names = list(names)
    return packages(names, postgres=any("psycopg" in imports(name)[1] for name in names))


def pattern_of(page: Path) -> Pattern:
    if page.stem not in patterns():
        raise SystemExit(f"{page.relative_to(ROOT)} has no front matter, so no pattern; see queuesmith/catalogue.py")
    return patterns()[page.stem]


# ---- tokens


def tokens(text: str) -> int:
    """Estimate without a tokenizer: 4 characters per token of prose, 3 per token of code."""
    code = sum(len(block) for block in re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE))
    return -(-(len(text) - code) // PROSE) + -(-code // CODE)


def description(skill_md: str) -> str:
    match = re.search(r"^description: (.*)$", skill_md, re.MULTILINE)
    assert match, "a skill has a description on one line"
    return match[1].strip().strip('"')
