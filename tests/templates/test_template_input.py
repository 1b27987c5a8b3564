"""Wrong answers: a clear message, and nothing on the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Render = Callable[..., Path]

WRONG = {
    "package is a keyword": ({"package": "class"}, "class is a word of the Python language"),
    "package shadows the standard library": ({"package": "json"}, "comes with Python"),
    "package shadows a dependency": ({"package": "redis"}, "module that this project imports"),
    "package is no name": ({"package": "My-App"}, "must be a Python name"),
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
def test_a_wrong_answer_is_named_and_nothing_is_written(
    render: Render, tmp_path: Path, answers: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        render("new", **answers)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_not_empty_is_left_alone(render: Render, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"old is not empty.*queuesmith add"):
        render("old")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["thesis.txt"]


def test_any_folder_name_makes_a_valid_project(render: Render) -> None:
    for folder, package in {"My Service 2": "my_service_2", "json": "json_app"}.items():
        assert (render(folder) / "src" / package / "api.py").is_file()
