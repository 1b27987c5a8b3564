"""guide/quotes.py: what a page quotes is in the file, and nothing else."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from bench.figures import number
from guide import cards, quotes
from queuesmith import catalogue

ROOT = Path(__file__).resolve().parents[2]
ERRORS = "reference/studyhall/patterns/core/failures.py"


def test_quote_is_the_source_with_its_real_lines():
    text = quotes.quote(f"{ERRORS}#Permanent")
    source = (ROOT / ERRORS).read_text().splitlines()
    first = source.index("class Permanent(JobError):") + 1
    assert text.startswith(f"Lines {first}–{first + 1} of `patterns/core/failures.py`:")
    assert "class Permanent(JobError):\n" in text
    assert "class Transient" not in text


@pytest.mark.parametrize("args", [f"{ERRORS}#Nothing", f"{ERRORS}#[nowhere]"])
def test_quote_of_what_is_not_there_stops_the_sync(args):
    with pytest.raises(SystemExit):
        quotes.quote(args)


def test_files_name_the_command_what_to_install_and_where_the_detail_is():
    text = quotes.files(catalogue.find("event-bus"))
    assert "`queuesmith add event-bus inbox --into src/app`" in text
    assert '`"sqlalchemy[asyncio]>=' in text
    assert re.search(r"`event-bus.nats` \(`\"nats-py>=", text)
    assert "[module](../../../reference/studyhall/patterns/event_bus/bus.py)" in text
    assert "[in StudyHall](../../../reference/studyhall/bus.py)" in text


def test_card_without_figures_says_where_they_would_come_from(monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "COMMITTED", tmp_path)
    pattern = dataclasses.replace(catalogue.find("retry"), summary="It holds.", proofs=("tests/a.py::test_a",))
    assert "It holds." in quotes.card(pattern)
    assert "by its proof: `make faults`" in quotes.card(pattern)


def test_front_matter_is_yaml_as_everybody_else_reads_it():
    """The command has no YAML library, so it reads the part of YAML that an entry needs; both must agree."""
    for pattern in catalogue.patterns().values():
        head = pattern.page.read_text().split("---\n")[1]
        assert yaml.safe_load(head) == catalogue.front_matter(pattern.page), pattern.id


@pytest.mark.parametrize(
    ("head", "message"),
    {
        "title: x\nno key\n": "neither `key: value` nor part of a list: 'no key'",
        "title: x\n": "lacks modules, proofs",
        "title: x\nmodules: [retry.py]\nproofs:\n": "no paragraph `**Promise.**",
        "title: x\nmodules: [retry.py]\nproofs:\nmodul: z\n": "unknown modul; known: modules",
    }.items(),
)
def test_an_entry_that_cannot_be_read_is_named(monkeypatch, tmp_path, head, message):
    page = tmp_path / "skills/async-flow/references/x.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"---\n{head}---\n# X\n")
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    with pytest.raises(catalogue.WrongFrontMatter, match=re.escape(message)):
        catalogue.patterns.__wrapped__()


def test_every_number_is_written_one_way():
    shown = {1000: "1,000", 60.0: "60", 0.0021: "0.0021", 15.018: "15", 1234.5: "1,234", "n/a": "n/a", True: "True"}
    assert {value: number(value) for value in shown} == shown
    assert number({"p50": 1.0, "p99": 2500}) == "p50 1, p99 2,500"


def test_code_costs_more_tokens_than_prose():
    assert quotes.tokens("a" * 400) == 100
    assert quotes.tokens("```python\n" + "a" * 290 + "\n```") > 95
