"""What the skill pages take from the code: quotes, guarantee cards, and what `queuesmith add` copies.

The first line of a fenced block says what it quotes, so a page needs no other marks:

    ```python reference/studyhall/patterns/retry.py#decide full_jitter            functions, classes, Class.method
    ```python tests/skills/examples/background-jobs/worker.py#[wiring]            `# [wiring]` to `# [/wiring]`

The paragraph **Get it** says how to get the modules and where to read on; **Promise.** and **Measured.** are the card.
"""

import ast
import functools
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from guide import cards, sources
from queuesmith.catalogue import MODULES, ROOT, Pattern, closure, find, imports, module_of, packages, patterns

PROSE, CODE = 4, 3  # characters per token: an offline estimate that errs on the high side
PATTERNS = MODULES.relative_to(ROOT)
APP = MODULES.parent
_FENCES = {".ts": "ts", ".go": "go", ".toml": "toml"}
QUOTE = re.compile(
    r"(?:^Lines [\d–, ]+ of `patterns/[^`\n]+`:\n\n)?^```\w+ (?P<args>[^\n]+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FILES = re.compile(r"^(?P<text>\*\*Get it\*\*.*)$", re.MULTILINE)
CARD = re.compile(r"^(?P<text>\*\*Promise\.\*\*.*\n\n\*\*Measured.*)$", re.MULTILINE)


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
    # No origin for examples: they run in the tests, and import `patterns` as in a reader's project.
    where = ""
    if Path(path).is_relative_to(PATTERNS):
        where = f"Lines {', '.join(spans)} of `patterns/{Path(path).relative_to(PATTERNS)}`:"
    body = "\n\n\n".join(parts) if any("\n" in part for part in parts) else "\n".join(parts)
    if path.startswith("reference/stacks/"):
        body = body.replace("from studyhall.patterns", "from patterns")
        # where `queuesmith add` puts them
        body = re.sub(r"^from (celery_jobs|sqs_jobs|table_worker) import", r"from patterns.\1 import", body, flags=re.M)
    return f"{where}\n\n```{_FENCES.get(Path(path).suffix, 'python')} {args}\n{body}\n```".lstrip()


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
        first, last, _ = sources.lines_of(path, name)
        first -= 1
    return textwrap.dedent("\n".join(lines[first:last])).strip("\n"), first + 1, last


# ---- the pattern of a page


def card(pattern: Pattern) -> str:
    return cards.card(pattern, brief=True)


def files(pattern: Pattern) -> str:
    """The command that copies all that the code on the page imports, what to install, and where the details are."""
    more = _more(pattern)
    modules = closure([*pattern.own, *(name for extra in more for name in extra.own)])
    command = f"queuesmith add {' '.join(extra.id for extra in (pattern, *more))} --into src/app"
    text = f"**Get it**: `{command}`"
    if wanted := _requirements(modules):
        text += ". **Install** " + " ".join(f'`"{item}"`' for item in wanted)
    if parts := [_part_of(pattern, part) for part in pattern.parts]:
        text += f". Parts to add: {', '.join(parts)}"
    up = "../" * 3  # from skills/SKILL/references
    module, proof = pattern.own[0], pattern.proofs[0].partition("::")[0]
    text += f". Limits: [module]({up}{PATTERNS / module}), [proof]({up}{proof})"
    if place := in_studyhall(pattern):
        text += f", [in StudyHall]({up}{APP.relative_to(ROOT).as_posix()}/{place})"
    return f"{text}."


def in_studyhall(pattern: Pattern) -> str:
    """The file of the reference app that imports most of the pattern; the handlers import the frame of every job."""
    modules = {name.removesuffix(".py").replace("/", ".") for name in (*pattern.own, *pattern.parts)}
    modules |= {name.rpartition(".")[0] for name in modules if not name.startswith("core.")} - {""}
    counted = {file: sum(name in modules or base in modules for base, name in names) for file, names in _uses().items()}
    best = max(counted, key=lambda file: (counted[file] > 0, "jobs/" not in file, counted[file], file == "worker.py"))
    return best if counted[best] else ""


@functools.cache
def _uses() -> dict[str, list[tuple[str, str]]]:
    """File of StudyHall -> what it imports from the patterns, as (module, module.name); without commands and tables."""
    uses = {}
    for path in sorted(APP.rglob("*.py")):
        if MODULES not in path.parents and not path.name.startswith(("cli", "database", "demo")):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
            parts = [
                (str(node.module).partition("patterns")[2].lstrip("."), node.names)
                for node in nodes
                if "patterns" in str(node.module)
            ]
            uses[path.relative_to(APP).as_posix()] = [
                (base, f"{base}.{alias.name}".lstrip(".")) for base, names in parts for alias in names
            ]
    return uses


def _part_of(pattern: Pattern, part: str) -> str:
    needs = " ".join(f'`"{item}"`' for item in pattern.needed_for(part))
    return f"`{pattern.id}.{PurePosixPath(part).stem}`{needs and f' ({needs})'}"


def imported(page: Path) -> set[str]:
    """The modules that the examples on this page import."""
    modules = set()
    for match in QUOTE.finditer(page.read_text()):
        if not match["args"].startswith("tests/skills/examples/"):
            continue
        current = QUOTE.search(quote(match["args"]))
        for node in ast.walk(ast.parse(current["code"] if current else "")):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "patterns":
                base = str(node.module).split(".")[1:]
                modules |= {module_of([*base, alias.name]) or module_of(base) or "" for alias in node.names}
    return modules - {""}


def _more(pattern: Pattern) -> list[Pattern]:
    """Further patterns to add for the code on its page; those of the core last, as others mostly include them."""
    result: list[Pattern] = []
    for module in sorted(imported(pattern.page), key=lambda name: (name.startswith("core/"), name)):
        if not any(module in known.modules for known in (pattern, *result)):
            result.append(_owner(module))
    return result


def _owner(module: str) -> Pattern:
    """The pattern that owns the module, or most of its package; else the smallest that includes it."""
    name = module.removesuffix("__init__.py")

    def fits(candidate: Pattern) -> tuple[int, int]:
        return sum(own.startswith(name) for own in candidate.own), -len(candidate.modules)

    parts = [
        find(f"{pattern.id}.{PurePosixPath(part).stem}") for pattern in patterns().values() for part in pattern.parts
    ]
    # Parts come last: they include the rest of their package too.
    for some in (patterns().values(), parts):
        if owners := [candidate for candidate in some if module in candidate.modules and fits(candidate)[0]]:
            return max(owners, key=fits)
    return max((pattern for pattern in patterns().values() if module in pattern.modules), key=fits)


def _requirements(names: Iterable[str]) -> list[str]:
    """What to install for these modules, with PostgreSQL's driver if one of them can use it."""
    names = list(names)
    return packages(names, postgres=any("psycopg" in imports(name)[1] for name in names))


# ---- tokens


def tokens(text: str) -> int:
    """Estimate without a tokenizer: 4 characters per token of prose, 3 per token of code."""
    code = sum(len(block) for block in re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE))
    return -(-(len(text) - code) // PROSE) + -(-code // CODE)


def description(skill_md: str) -> str:
    match = re.search(r"^description: (.*)$", skill_md, re.MULTILINE)
    assert match, "a skill has a description on one line"
    return match[1].strip().strip('"')
