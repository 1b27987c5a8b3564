"""`queuesmith` in an existing project: copies, proves, never overwrites what was edited, tells what changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import export

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]
Run = Callable[..., Any]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A project that somebody else made."""
    project = tmp_path / "shop"
    (project / "src" / "shop").mkdir(parents=True)
    (project / "src" / "shop" / "__init__.py").touch()
    (project / "pyproject.toml").write_text('[project]\nname = "shop"\nversion = "1"\n')
    return project


@pytest.fixture
def queuesmith(run: Run, installed: Path, shop: Path) -> Command:
    def go(*args: object, root: Path = installed, cwd: Path = shop, code: int = 0) -> Any:
        return run(sys.executable, root / "bin" / "queuesmith", *args, cwd=cwd, code=code)

    return go


def folders(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_dir() and path.name != "__pycache__"}


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_catalogue_is_listed(queuesmith: Command) -> None:
    assert "dead-letter" in queuesmith("list", "--skill", "background-jobs").stdout
    listed = {row["id"]: row for row in json.loads(queuesmith("list", "--json").stdout)}
    assert listed["retry"]["modules"] == ["__init__.py", "core/errors.py", "retry.py"]
    assert "bullmq==" in " ".join(listed["bullmq-worker"]["requirements"])


def test_added_modules_are_ours_byte_for_byte_and_their_proof_passes_there(
    queuesmith: Command, run: Run, shop: Path
) -> None:
    told = json.loads(queuesmith("add", "retry", "circuit_breaker", "--into", "src/shop", "--json").stdout)
    assert told["package"] == "shop.patterns"
    assert told["requirements"] == ["redis[hiredis]>=6.2,<9"]
    for module in (shop / "src/shop/patterns").glob("*.py"):
        assert module.read_bytes() == (ROOT / "reference/studyhall/patterns" / module.name).read_bytes()
    assert {"retry.py", "core/errors.py", "circuit_breaker.py"} <= {
        path.name for path in (shop / "src/shop/patterns").glob("*.py")
    }
    proofs = "".join(path.read_text() for path in (shop / "tests").rglob("*.py"))
    assert "studyhall." not in proofs
    assert "from shop.patterns.retry import" in proofs
    pytest_ = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:valkey",
        "-o",
        "asyncio_mode=auto",
        "--strict-markers",
    )
    said = run(
        *pytest_, "tests/patterns/test_retry.py", "tests/patterns/test_circuit_breaker_redis.py", cwd=shop
    )
    assert " passed" in said.stdout
    # A proof that could not fail there would prove nothing: break the promise, and it does.
    retry = shop / "src/shop/patterns/retry.py"
    retry.write_text(retry.read_text().replace("rng.random() * min(", "min("))
    assert " failed" in run(*pytest_, "tests/patterns/test_retry.py", "-k", "cap", cwd=shop, code=1).stdout


def test_adding_again_changes_nothing_and_adding_more_keeps_what_is_there(
    queuesmith: Command, shop: Path
) -> None:
    queuesmith("add", "retry", "--into", "src/shop", "--no-tests")
    before = files(shop)
    assert "0 files written" in queuesmith("add", "retry", "--into", "src/shop", "--no-tests").stdout
    assert files(shop) == before
    queuesmith("add", "deadline", "--into", "src/shop", "--no-tests")
    recorded = json.loads((shop / ".queuesmith.json").read_text())
    assert recorded["packages"]["src/shop"]["patterns"] == ["deadline", "retry"]
    assert not (shop / "tests").exists()


def test_an_edited_file_is_shown_and_not_overwritten(queuesmith: Command, shop: Path) -> None:
    queuesmith("add", "retry", "--into", "src/shop", "--no-tests")
    edited = shop / "src/shop/patterns/core/errors.py"
    edited.write_text(edited.read_text() + "\nOURS = True\n")
    before = files(shop)
    refused = queuesmith("add", "retry", "deadline", "--into", "src/shop", "--no-tests", code=2)
    assert "-OURS = True" in refused.stdout
    assert "core/errors.py" in refused.stderr
    assert "--force" in refused.stderr
    assert files(shop) == before, "nothing of it was written, not even the new module"
    assert (
        "-OURS = True" in queuesmith("add", "retry", "--into", "src/shop", "--no-tests", "--dry-run").stdout
    )
    assert files(shop) == before
    queuesmith("add", "retry", "--into", "src/shop", "--no-tests", "--force")
    assert "OURS" not in edited.read_text()


def test_a_file_that_was_never_ours_is_not_overwritten(queuesmith: Command, shop: Path) -> None:
    mine = shop / "src/shop/patterns/retry.py"
    mine.parent.mkdir()
    mine.write_text("# hand-made\n")
    queuesmith("add", "retry", "--into", "src/shop", code=2)
    assert files(shop).keys() == {"pyproject.toml", "src/shop/__init__.py", "src/shop/patterns/retry.py"}
    assert mine.read_text() == "# hand-made\n"


def test_diff_tells_what_changed_upstream_and_here_and_takes_it(
    queuesmith: Command, shop: Path, tmp_path: Path
) -> None:
    queuesmith("add", "retry", "deadline", "--into", "src/shop", "--no-tests")
    assert "0 of" in queuesmith("diff").stdout
    newer = tmp_path / "newer"
    export(newer)
    patterns = newer / "reference/studyhall/patterns"
    for name in ("core/errors.py", "retry.py"):
        (patterns / name).write_text((patterns / name).read_text() + "\nFIXED = True\n")
    (patterns / "deadline.py").write_text(
        (patterns / "deadline.py").read_text() + "\nfrom .job_ids import job_id\n"
    )
    ours = shop / "src/shop/patterns"
    (ours / "core/errors.py").write_text((ours / "core/errors.py").read_text() + "\nOURS = True\n")
    told = json.loads(queuesmith("diff", "--json", root=newer, code=1).stdout)
    assert told["files"]["src/shop/patterns/core/errors.py"] == "changed on both sides"
    assert told["files"]["src/shop/patterns/retry.py"] == "changed upstream"
    assert "+FIXED = True" in told["diffs"]["src/shop/patterns/retry.py"]
    (ours / "job_ids.py").write_text("# hand-made, and in the way of a module that a fix has come to need\n")
    before = files(shop)
    refused = queuesmith("diff", "--apply", root=newer, code=2)
    assert "patterns/core/errors.py, src/shop/patterns/job_ids.py" in refused.stderr
    assert files(shop) == before
    (ours / "job_ids.py").unlink()
    queuesmith("diff", "--apply", "--force", root=newer)
    assert (ours / "core/errors.py").read_bytes() == (patterns / "core/errors.py").read_bytes()
    assert (ours / "job_ids.py").is_file(), "a module that a fix has come to need arrives with it"
    assert "0 of" in queuesmith("diff", root=newer).stdout


WRONG = {
    "unknown pattern": (("add", "dead-leter", "--into", "src/shop"), "did you mean dead-letter?"),
    "no such folder": (("add", "retry", "--into", "src/shoop"), "src/shoop is not a folder"),
    "the project itself": (("add", "retry", "--into", "."), "like src/app"),
    "nothing was copied": (("diff",), "there is no .queuesmith.json"),
    "not empty": (("new", "."), "is not empty"),
    "contradiction": (
        ("new", "x", "--kind", "background-jobs", "--broker", "kafka"),
        "for event-driven services",
    ),
    "job in events": (("new", "x", "--kind", "event-driven", "--job", "send-mail"), "use --event"),
    "job and event": (("new", "x", "--event", "trip.booked", "--job", "send-mail"), "use --event"),
    "a file": (("new", "pyproject.toml"), "pyproject.toml is a file"),
    "inside a file": (("new", "pyproject.toml/x"), "Not a directory"),
    "name too long": (("new", "x" * 300), "File name too long"),
    "wrong answer, deep": (("new", "a/b/c", "--fields", "when: datetime"), "fields: when: datetime must be"),
    "unknown Python": (("new", "x", "--python", "3.8"), "invalid choice: '3.8'"),
    "unknown pattern in new": (("new", "x", "--pattern", "retry,sagas"), "did you mean saga?"),
    "unknown pattern in list": (("list", "retri"), "did you mean inline-retry or retry?"),
    "keyword": (("new", "x", "--package", "class"), "class is a word of the Python language"),
}


@pytest.mark.parametrize(("args", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_named_and_nothing_is_written(
    queuesmith: Command, shop: Path, args: tuple[str, ...], message: str
) -> None:
    before = files(shop), folders(shop)
    refused = queuesmith(*args, code=2)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (files(shop), folders(shop)) == before


def test_a_folder_that_was_empty_is_empty_again_after_a_refusal(queuesmith: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    queuesmith("new", "mine", "--job", "No Name", cwd=tmp_path, code=2)
    assert list((tmp_path / "mine").iterdir()) == []


def test_what_cannot_be_written_leaves_nothing_behind(queuesmith: Command, shop: Path) -> None:
    (shop / "tests").write_text("a file where the folder for the proofs would be")
    before = files(shop), folders(shop)
    refused = queuesmith("add", "retry", "--into", "src/shop", code=2)
    assert "Nothing was changed" in refused.stderr
    assert (files(shop), folders(shop)) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"packages": []}', '{"packages": {"src/shop": {}}}'])
def test_a_damaged_record_is_named(queuesmith: Command, shop: Path, text: str) -> None:
    (shop / ".queuesmith.json").write_text(text)
    for command in (("diff",), ("add", "retry", "--into", "src/shop")):
        refused = queuesmith(*command, code=2)
        assert "is damaged" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert (shop / ".queuesmith.json").read_text() == text


@pytest.mark.parametrize(
    ("into", "package"),
    {"backend/app": "backend.app", "lib/app/core": "app.core"}.items(),
)
def test_a_project_of_any_layout_runs_the_proofs(
    queuesmith: Command, run: Run, tmp_path: Path, into: str, package: str
) -> None:
    project = tmp_path / "theirs"
    (project / into).mkdir(parents=True)
    (project / into / "__init__.py").touch()
    (project / "pyproject.toml").write_text('[project]\nname = "theirs"\nversion = "1"\n')
    told = json.loads(queuesmith("add", "retry", "--into", into, "--json", cwd=project).stdout)
    assert told["package"] == f"{package}.patterns"
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:valkey", "-o", "asyncio_mode=auto")
    said = run(*command, "tests/patterns/test_retry.py", "-k", "cap", cwd=project).stdout
    assert " passed" in said
    assert "0 of" in queuesmith("diff", cwd=project / into).stdout


def test_a_folder_that_cannot_be_imported_is_refused(queuesmith: Command, shop: Path) -> None:
    (shop / "src" / "my-app").mkdir()
    assert "no Python name" in queuesmith("add", "retry", "--into", "src/my-app", code=2).stderr


def test_new_is_the_scaffold_with_fewer_words(queuesmith: Command, tmp_path: Path) -> None:
    made = queuesmith(
        "new", "trips", "--event", "trip.booked", "--fields", "city: str", "--json", cwd=tmp_path
    )
    told = json.loads(made.stdout)
    assert "src/trips/processing.py" in told["files"]
    assert "TripBooked" in (tmp_path / "trips/src/trips/events.py").read_text()


@pytest.mark.parametrize(
    ("folder", "package"),
    {
        "Ünï Çode 2": "uni_code_2",
        "日本": "my_service",
        "-dash": "dash",
        "class": "class_app",
        "test": "test_app",
    }.items(),
)
def test_any_folder_name_makes_a_project(
    queuesmith: Command, tmp_path: Path, folder: str, package: str
) -> None:
    made = queuesmith("new", "--", folder, cwd=tmp_path)
    assert (tmp_path / folder / "src" / package / "api.py").is_file()
    where = made.stdout.split("cd ", 1)[1].splitlines()[0]
    assert subprocess.run(f"cd -- {where} && pwd", shell=True, cwd=tmp_path, check=False).returncode == 0  # noqa: S602


def test_a_name_may_be_as_long_as_a_folders(queuesmith: Command, tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 39 + "-" + "b" * 150)  # cut to 40 characters it would end with a dash
    queuesmith("new", folder, cwd=tmp_path)
    assert (folder / "src" / ("a" * 39)).is_dir()


def test_a_repository_that_was_just_made_is_as_good_as_empty(
    queuesmith: Command, run: Run, tmp_path: Path
) -> None:
    run("git", "init", "-q", "fresh", cwd=tmp_path)
    told = json.loads(queuesmith("new", "fresh", "--json", cwd=tmp_path).stdout)
    assert "Makefile" in told["files"]
    assert not [path for path in told["files"] if path.startswith(".git/")]


def test_the_command_alone_and_help_say_what_there_is(queuesmith: Command) -> None:
    assert "queuesmith new my-service" in queuesmith(code=2).stdout
    for command in ("list", "new", "add", "diff"):
        assert f"usage: queuesmith {command}" in queuesmith(command, "--help").stdout
    told = queuesmith("list", "retry").stdout
    assert "full jitter" in told
    assert "tests/reference/unit/test_retry.py" in told


def test_when_uvx_cannot_fetch_copier_it_says_what_else_can_be_done(installed: Path, tmp_path: Path) -> None:
    alone, tools = tmp_path / "bin" / "python3", tmp_path / "tools"
    for folder in (alone.parent, tools):
        folder.mkdir()
    shutil.copy(Path(sys.base_prefix) / "bin" / "python3", alone)
    for name in ("uv", "uvx"):
        shutil.copy(Path(sys.executable).with_name(name), tools / name)
    env = {"PATH": str(tools), "PYTHONHOME": sys.base_prefix, "HOME": str(tmp_path), "UV_OFFLINE": "1"}
    command = [alone, installed / "bin" / "queuesmith", "new", "x"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "uvx could not get it" in done.stderr
    assert "pip install copier" in done.stderr
    assert not (tmp_path / "x").exists()


def test_without_copier_it_says_how_to_get_it(installed: Path, tmp_path: Path) -> None:
    alone = tmp_path / "bin" / "python3"
    alone.parent.mkdir()
    shutil.copy(Path(sys.base_prefix) / "bin" / "python3", alone)
    env = {"PATH": str(tmp_path / "nothing"), "PYTHONHOME": sys.base_prefix}
    done = subprocess.run(
        [alone, installed / "bin" / "queuesmith", "new", "x"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install copier" in done.stderr


def test_the_wheel_carries_all_that_the_command_copies(run: Run, shop: Path, tmp_path: Path) -> None:
    """What `uvx --from CHECKOUT queuesmith` installs."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "wheel", cwd=ROOT)
    with zipfile.ZipFile(next((tmp_path / "wheel").glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    command = (sys.executable, "-S", "-m", "queuesmith")
    env = {"PYTHONPATH": str(tmp_path / "site")}
    run(*command, "add", "idempotency", "--into", "src/shop", cwd=shop, env=env)
    assert (shop / "src/shop/patterns/idempotency/markers.py").is_file()
    assert (shop / "tests/patterns/test_idempotency.py").is_file()
    assert (tmp_path / "site/queuesmith/shipped/copier.yml").is_file()
