"""tools/quotes.py: what a page quotes is in the file, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import quotes  # noqa: E402

ERRORS = "reference/studyhall/patterns/core/errors.py"


def test_quote_is_the_source_with_its_real_lines() -> None:
    text = quotes.quote(f"{ERRORS}#Permanent")
    source = (ROOT / ERRORS).read_text().splitlines()
    first = source.index("class Permanent(JobError):") + 1
    assert text.startswith(f"Lines {first}–{first + 1} of [`modules/errors.py`](../modules/errors.py):")
    assert "class Permanent(JobError):\n" in text
    assert "class Transient" not in text


def test_outline_shows_signatures_and_docstrings_only() -> None:
    text = quotes.quote(f"{ERRORS}#RateLimited~")
    assert "def __init__(self, message: str" in text
    assert "self.retry_after = retry_after" not in text


@pytest.mark.parametrize("args", [f"{ERRORS}#Nothing", f"{ERRORS}#[nowhere]"])
def test_quote_of_what_is_not_there_stops_the_sync(args: str) -> None:
    with pytest.raises(SystemExit):
        quotes.quote(args)


def test_modules_of_a_skill_are_closed_under_import() -> None:
    for skill in ("async-flow", "background-jobs", "event-driven"):
        names = set(quotes.modules(skill)) - {"requirements.txt"}
        assert {f"{sibling}.py" for name in names for sibling in quotes.imports(name)[0]} <= names


def test_card_without_figures_says_where_they_would_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": "x", "summary": "It holds.", "proofs": ["tests/a.py::test_a"], "module": "core/errors.py"}
    monkeypatch.setattr(quotes, "catalogue", lambda: {"x": row})
    assert "It holds." in quotes.card("x")
    assert "`tests/a.py`, run `make faults`" in quotes.card("x")
    assert quotes.card("y") == quotes.MISSING


def test_tokens_count_code_dearer_than_prose() -> None:
    assert quotes.tokens("a" * 400) == 100
    assert quotes.tokens("```python\n" + "a" * 290 + "\n```") > 95
