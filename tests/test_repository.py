"""The repository itself: small, portable, honest about its proofs."""

import ast
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from guide.pages import READING
from harness.missing import need_binary
from queuesmith import catalogue

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ROOT / "reference" / "studyhall" / "patterns"
UNTRACKED = {".git", ".venv", "build", "dist", "site", "node_modules", "__pycache__", ".studyhall"}


@functools.cache
def tracked():
    """What git tracks; in an unpacked archive, every file that is not built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not UNTRACKED & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_symlink() or path.is_file()]


@functools.cache
def texts():
    files = {}
    for path in tracked():
        try:
            files[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or a sample document
    return files


def lines_matching(pattern, suffixes=("",)):
    wanted = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts().items()
        if name.endswith(suffixes)
        for number, line in enumerate(text.splitlines(), 1)
        if wanted.search(line)
    ]


# ---- what is in the repository


def test_no_symlinks():
    """Plugin validation refuses them, and they do not survive every way of copying."""
    assert [str(path) for path in tracked() if path.is_symlink()] == []


def test_repository_stays_small():
    """Every installation of the plugin copies all of it."""
    sizes = {path: path.stat().st_size for path in tracked()}
    assert sum(sizes.values()) < 5 * 1024 * 1024
    assert {str(path): size for path, size in sizes.items() if size > 600_000} == {}


def test_lock_files_name_no_address():
    """An index set in somebody's environment would otherwise end up in everybody's installation."""
    locks = [name for name in texts() if Path(name).suffix == ".lock" or re.search(r"requirements.*\.txt$", name)]
    assert "requirements.lock" in locks
    assert "bootstrap.lock" in locks
    urls = [line for line in lines_matching(r"://|--(extra-)?index-url|--find-links") if line.split(":")[0] in locks]
    assert urls == []
    assert [name for name in texts() if Path(name).name in {"uv.lock", "pylock.toml", "yarn.lock"}] == []


def test_npm_lock_files_name_no_registry():
    for name, text in texts().items():
        if Path(name).name == "package-lock.json":
            packages = json.loads(text)["packages"]
            assert [path for path, package in packages.items() if "resolved" in package] == [], name
            assert all(package.get("integrity") for path, package in packages.items() if path), name


def test_every_locked_package_has_hashes():
    for name in ("requirements.lock", "bootstrap.lock"):
        blocks = re.split(r"\n(?=\w)", texts()[name].strip())
        assert [block.split()[0] for block in blocks if "--hash=sha256:" not in block] == [], name


def test_no_path_of_one_machine():
    places = ["/root", "/home/[a-z][a-z0-9_-]*", "/Users/[A-Za-z]+"]
    if len(ROOT.parts) > 2:  # where this very checkout lies, unless that is a place like /app
        places.append(re.escape(str(ROOT)))
    assert lines_matching(rf"(?<![\w./-])(?:{'|'.join(places)})/") == []


def test_nothing_is_left_undone():
    marks = "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"])
    assert lines_matching(rf"\b(?:{marks})\b", (".py", ".sh", ".toml", "Makefile", ".yml", ".yaml", ".js")) == []
    undone = r"raise NotImplemented" + r"Error|mark\.(?:skip\b|x" + r"fail)"
    assert lines_matching(undone, (".py",)) == []


def test_nothing_is_left_to_fill_in():
    """What `make new-pattern` lays out is marked where text is missing."""
    left = lines_matching("FILL " + "IN")
    assert not left, "\n".join(["write what is marked:", *left])


# ---- one source of truth


def modules():
    return sorted(path for path in PATTERNS.rglob("*.py") if path.name != "__init__.py" and path in set(tracked()))


@pytest.mark.parametrize("module", modules(), ids=lambda path: str(path.relative_to(PATTERNS)))
def test_pattern_imports_nothing_of_the_app(module):
    """Templates ship these files as they are, inside a package with another name."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            absolute = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            absolute = [node.module or ""]
        elif isinstance(node, ast.ImportFrom):
            depth = len(module.relative_to(PATTERNS).parts)
            assert node.level <= depth, f"line {node.lineno} reaches out of the patterns"
            continue
        else:
            continue
        for name in absolute:
            top = name.split(".")[0]
            assert top not in {"studyhall", "harness", "tests"}, f"line {node.lineno} imports {name} of the app"
            known = top in sys.stdlib_module_names or importlib.util.find_spec(top)
            assert known, f"line {node.lineno} imports {name}, which is not installed"


@pytest.mark.parametrize("module", modules(), ids=lambda path: str(path.relative_to(PATTERNS)))
def test_what_a_pattern_imports_of_its_siblings_is_there(module):
    for sibling in catalogue.imports(module.relative_to(PATTERNS).as_posix())[0]:
        assert (PATTERNS / sibling).is_file(), f"imports {sibling}"


PAGES = [
    path
    for path in sorted((ROOT / "skills").glob("*/references/*.md"))
    if path.parts[-3] in catalogue.SKILLS and f"{path.parts[-3]}/{path.stem}" not in READING
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_page_of_a_pattern_is_its_catalogue_entry(page):
    entry = catalogue.patterns().get(page.stem)
    assert entry, "the page begins with title, modules and proofs: see queuesmith/catalogue.py"
    assert entry.page == page, "its id is that of another page"
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", entry.id)
    assert "…" not in entry.title + entry.summary, "say what it promises"
    assert entry.proofs, "a pattern without a proof does not ship"
    for proof in entry.proofs:
        file, name = proof.split("::")
        assert (ROOT / file).is_file(), f"{proof}: no such file"
        assert name in proofs_in(ROOT / file), f"{proof}: no such test"
    if (ROOT / "reference" / "figures" / entry.figures).exists():
        written = "".join((ROOT / file).read_text() for file in entry.proof_files)
        assert f'"{entry.id}"' in written, f"no proof writes {entry.figures}"


def test_every_pattern_module_belongs_to_a_pattern():
    """`core/` belongs to all of them."""
    entries = catalogue.patterns().values()
    listed = {name for entry in entries for name in (*entry.own, *catalogue.closure(entry.parts))}
    present = {str(path.relative_to(PATTERNS)) for path in modules()}
    assert {name for name in present - listed if not name.startswith("core/")} == set(), "name it in a page"
    assert {name for entry in entries for name in (*entry.own, *entry.parts)} - present == set()


@functools.cache
def proofs_in(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_figures_are_measured_and_not_typed():
    typed = []
    for name, text in texts().items():
        if (
            name.startswith("tests/")
            and name.endswith(".py")
            and name != "tests/test_harness.py"
            and "figures(" in text
        ):
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            typed += [
                f"{name}:{given.value.lineno}: {given.arg}"
                for call in calls
                if isinstance(call.func, ast.Name) and call.func.id == "figures"
                for given in call.keywords
                if isinstance(given.value, ast.Constant) and not isinstance(given.value.value, str)
            ]
    assert typed == [], "say what was counted: len(jobs), not 5"


def test_test_files_have_names_of_their_own():
    names = [path.name for path in tracked() if path.match("tests/**/test_*.py")]
    assert sorted(set(names)) == sorted(names)


# ---- a new pattern


@pytest.mark.slow
def test_a_new_pattern_is_laid_out_and_the_tests_name_what_is_left_to_fill_in(tmp_path):
    """At most six files, and nothing but those marks: all else about them is right from the start."""
    copy = tmp_path / "copy"
    for path in tracked():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)

    def run(*command):
        env = {**os.environ, "PYTHONPATH": str(copy)}
        return subprocess.run(
            [sys.executable, "-m", *command], cwd=copy, env=env, capture_output=True, text=True, check=False
        )

    made = run("guide.new_pattern", "slow-start", "background-jobs")
    assert made.returncode == 0, made.stderr
    places = set(re.findall(r"^fill in: (.*)$", made.stdout, re.MULTILINE))
    assert len(places) <= 6
    again = run("guide.new_pattern", "slow-start", "background-jobs")
    assert "is there already" in again.stderr
    checks = ["tests/test_repository.py", "tests/test_closures.py", "tests/skills/test_skill_pages.py"]
    wanted = "(slow or fill_in or belongs or names_of_their_own or reachable) and not laid_out"
    done = run("pytest", "-q", "-p", "no:cacheprovider", "-rf", *checks, "-k", wanted)
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    assert failed == ["tests/test_repository.py::test_nothing_is_left_to_fill_in"], done.stdout
    assert set(re.findall(r"^E  +([\w./-]+):\d+: .*FILL", done.stdout, re.MULTILINE)) == places


# ---- the commands


def test_make_help_lists_every_target():
    make = need_binary("make", how="install make with your package manager")
    shown = subprocess.run([make, "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    listed = set(re.findall(r"^\s*(?:\x1b\[1m)?([a-z][a-z-]*)", shown, re.MULTILINE)) - {"make"}
    text = (ROOT / "Makefile").read_text()
    rules = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    phony = {name for line in re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE) for name in line.split()}
    assert rules == listed, "every target has a ## description"
    assert phony == rules, "every target is .PHONY, and every .PHONY name is a target"


def test_ci_script_is_runnable():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    bash = need_binary("bash", how="install bash with your package manager")
    checked = subprocess.run([bash, "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


# ---- what GitHub runs


def read_yaml(path):
    data = yaml.safe_load(path.read_text())
    return {"on": data.pop(True), **data} if True in data else data  # YAML 1.1 reads on: as true


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflow_is_valid_has_limits_and_few_rights(path):
    workflow = read_yaml(path)
    schema = get_builtin_schema("vendor.github-workflows")
    wrong = jsonschema.validators.validator_for(schema)(schema).iter_errors(workflow)
    assert [f"{error.json_path}: {error.message}" for error in wrong] == []
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False, name
            # Text that others can write (branch names, titles) goes through the environment, not into a shell line.
            assert "${{" not in step.get("run", ""), name
            subprocess.run(["bash", "-n"], input=step.get("run", ""), text=True, check=True)
    commands = " ".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= set(targets)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[bp]*.yml")), ids=lambda path: path.name
)
def test_issue_form_has_what_github_asks_for(path):
    form = read_yaml(path)
    assert form["name"]
    assert form["description"]
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    for part in form["body"]:
        assert part["type"] in kinds
        assert part["attributes"]["label"]
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
