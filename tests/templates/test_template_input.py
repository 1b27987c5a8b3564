"""Wrong answers: a clear message, and nothing on the disk."""

import copier
import pytest

WRONG = {
    "package is a keyword": ({"package": "class"}, "class is a word of the Python language"),
    "package shadows the standard library": ({"package": "json"}, "comes with Python"),
    "package shadows a dependency": ({"package": "redis"}, "module that this project imports"),
    "package is no name": ({"package": "My-App"}, "must be a Python name"),
    "project is a dependency": ({"project_name": "redis"}, "cannot be installed beside"),
    "project is a dependency of one": ({"project_name": "typing-extensions"}, "cannot be installed beside"),
    "project is a broker's": ({"project_name": "nats-py"}, "cannot be installed beside"),
    "project name": ({"project_name": "My Service"}, "lower-case letters, digits and single dashes"),
    "job is no name": ({"job": "Send Report"}, "lower-case words joined by dashes"),
    "job is taken": ({"job": "clean-up"}, "taken by the code around it"),
    "job is a keyword": ({"job": "import"}, "taken by the code around it"),
    "event has no verb": ({"kind": "event-driven", "event": "order"}, "like order.placed"),
    "event is taken": ({"kind": "event-driven", "event": "order.confirmed"}, "taken by the code around it"),
    "field has no type": ({"fields": "customer"}, "pairs of a name and a type"),
    "field of an unknown type": ({"fields": "when: datetime"}, "str, int, float or bool"),
    "field twice": ({"fields": "a: int, a: str"}, "the same field twice"),
    "field is a keyword": ({"fields": "class: str"}, "needs: class"),
    "field is the table's": ({"fields": "key: str"}, "needs: key"),
    "field is pydantic's": ({"fields": "model_name: str"}, "pydantic"),
    "unknown pattern": ({"patterns": ["retries"]}, "'retries' is not in"),
    "unknown kind": ({"kind": "cron"}, "'cron' is not in"),
    "unknown broker": ({"kind": "event-driven", "broker": "pigeon"}, "'pigeon' is not in"),
    "unknown database": ({"database": "oracle"}, "'oracle' is not in"),
    "old Python": ({"python_version": "3.8"}, "'3.8' is not in"),
}


@pytest.mark.parametrize(("answers", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_named_and_nothing_is_written(installed, tmp_path, answers, message):
    with pytest.raises(ValueError, match=message):
        copier.run_copy(str(installed), tmp_path / "new", data=answers, defaults=True, quiet=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("folder", ["redis", "bullmq", "fastapi", "Psycopg"])
def test_a_folder_called_like_a_dependency_is_refused(installed, tmp_path, folder):
    """pip would be told to install the project as its own dependency."""
    with pytest.raises(ValueError, match=f"{folder.lower()} is a package that the project needs"):
        copier.run_copy(str(installed), tmp_path / folder, defaults=True, quiet=True)
    assert not (tmp_path / folder).exists()


def test_a_folder_that_is_not_empty_is_left_alone(installed, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"old is not empty.*queuesmith add"):
        copier.run_copy(str(installed), tmp_path / "old", defaults=True, quiet=True)
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_any_folder_name_makes_a_valid_project(render):
    for folder, package in {"My Service 2": "my_service_2", "json": "json_app"}.items():
        assert (render(folder) / "src" / package / "api.py").is_file()
