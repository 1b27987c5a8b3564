"""`queuesmith add celery-inbox | sqs-jobs | bullmq-ts | asynq`."""

from pathlib import Path

import pytest

from queuesmith import cli, stacks
from queuesmith.stacks import SERVICES, STACKS


@pytest.mark.parametrize("name", ["bullmq-ts", "asynq"])
def test_the_modules_arrive_as_they_are(name: str, tmp_path: Path) -> None:
    assert cli.main(["add", name, "--into", str(tmp_path)]) == 0
    for file in STACKS[name].files:
        assert (tmp_path / file).read_text() == (SERVICES / STACKS[name].folder / file).read_text()


def test_an_edited_module_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "inbox.ts").write_text("// mine")
    with pytest.raises(stacks.Refused, match=r"inbox.ts"):
        stacks.copy(STACKS["bullmq-ts"], tmp_path)
    assert not (tmp_path / "reliable.ts").exists()


@pytest.mark.parametrize(("name", "file"), [("celery-inbox", "celery_jobs.py"), ("sqs-jobs", "sqs_jobs.py")])
def test_a_python_stack_gets_the_patterns_that_its_module_imports(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "app"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["add", name, "--into", "src/app", "--no-tests"]) == 0
    text = (package / "patterns" / file).read_text()
    assert "studyhall" not in text
    for module in ("sync_inbox.py", "core/errors.py", "outside_call/sync.py", "outside_call/dbapi.py"):
        assert (package / "patterns" / module).is_file()
