"""One line of JSON per execution, and nothing secret in it."""

import json
import logging

import pytest

from studyhall.patterns.observability import JsonLines, bind, log_execution


def test_the_line_says_what_happened_and_hides_what_is_nobodys_business():
    record = logging.LogRecord("jobs", logging.INFO, __file__, 1, "sent to ann@example.com", None, None)
    with bind(tenant="acme"):
        line = json.loads(JsonLines().format(record))
    assert line["tenant"] == "acme"
    assert "ann@example.com" not in json.dumps(line)


def test_an_execution_is_one_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        log_execution(
            logging.getLogger("jobs"),
            job_id="7",
            name="mail",
            queue="mails",
            attempt=2,
            outcome="completed",
            duration=0.25,
        )
    (record,) = caplog.records
    line = json.loads(JsonLines().format(record))
    assert (line["job_id"], line["queue"], line["attempt"]) == ("7", "mails", 2)
