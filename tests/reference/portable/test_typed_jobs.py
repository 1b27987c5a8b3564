"""What a job carries is checked on both sides; no data is quoted."""

import json
from typing import Any

import pytest

from studyhall.patterns.typed_jobs import JobTypes, MalformedPayload, Payload, UnknownJob


class Mail(Payload):
    to: str
    pages: int = 1


async def send(ctx: Any, mail: Mail) -> str:
    return mail.to


@pytest.fixture
def jobs() -> JobTypes:
    jobs = JobTypes()
    jobs.register(name="mail", payload=Mail, handler=send, queue="mails")
    return jobs


def test_what_was_encoded_is_decoded_with_its_types(jobs: JobTypes):
    data = json.loads(json.dumps(jobs.encode("mail", {"to": "ann"})))
    assert jobs.decode("mail", data)[1] == Mail(to="ann", pages=1)


def test_an_unknown_job_and_a_wrong_payload_are_refused_without_their_data(jobs: JobTypes):
    with pytest.raises(UnknownJob):
        jobs.encode("male", {"to": "ann"})
    with pytest.raises(MalformedPayload) as refused:
        jobs.encode("mail", {"to": "ann", "pages": "secret"})
    assert "pages" in str(refused.value)
    assert "secret" not in str(refused.value)
