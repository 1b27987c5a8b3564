"""Typed jobs: what is refused, when, and what the refusal may say."""

import datetime
import json
import traceback
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator

from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.job import Deadline, Outcome
from studyhall.patterns.retry import AI, decide
from studyhall.patterns.typed_jobs import JobType, JobTypes, MalformedPayload, Payload, UnknownJob, UnknownVersion


class MakeGraph(Payload):
    document_id: str
    pages: list[int] = Field(default_factory=list)
    due: datetime.datetime | None = None


async def make_graph(ctx, payload: MakeGraph):
    return {"graph_of": payload.document_id}


@pytest.fixture
def jobs():
    jobs = JobTypes()
    jobs.register(name="graph-generation", payload=MakeGraph, handler=make_graph, queue="graphs", retry=AI)
    return jobs


def over_the_wire(data):
    return json.loads(json.dumps(data, allow_nan=False))


def test_the_decorator_and_the_call_register_the_same(jobs):
    @jobs.register(name="quiz-creation", payload=MakeGraph, version=3, deadline=Deadline(30, growth=2))
    async def quiz(ctx: Any, payload: MakeGraph):
        return None

    assert isinstance(quiz, JobType)
    assert jobs["quiz-creation"] is quiz
    assert [quiz.deadline.limit_for(n) for n in (1, 2, 3)] == [30, 60, 120]
    assert jobs.encode(quiz, {"document_id": "d"})["v"] == 3
    assert jobs.queues == ["default", "graphs"]
    assert {job_type.name for job_type in jobs} == {"graph-generation", "quiz-creation"}


@pytest.mark.parametrize(
    "payload", [{}, {"document_id": 7}, {"document_id": "d", "surprise": 1}, {"document_id": "d", "pages": ["x"]}]
)
def test_a_bad_payload_is_refused_before_it_is_enqueued(jobs, payload):
    with pytest.raises(MalformedPayload, match=r"graph-generation v1: malformed at"):
        jobs.encode("graph-generation", payload)


def test_a_model_that_was_tampered_with_after_validation_is_refused(jobs):
    with pytest.raises(MalformedPayload):
        jobs.encode("graph-generation", MakeGraph.model_construct(document_id=None))


def test_a_payload_that_does_not_survive_json_is_refused(jobs):
    class Opaque(BaseModel):
        thing: Any = None

    class Uneven(BaseModel):
        text: str

        @field_validator("text")
        @classmethod
        def once(cls, text: str) -> str:
            assert not text.endswith("!")
            return text + "!"

    jobs.register(name="opaque", payload=Opaque, handler=make_graph)
    jobs.register(name="uneven", payload=Uneven, handler=make_graph)
    with pytest.raises(MalformedPayload, match="no JSON form"):
        jobs.encode("opaque", {"thing": object()})
    with pytest.raises(MalformedPayload, match=r"uneven v1: malformed at text \(assertion_error\)"):
        jobs.encode("uneven", {"text": "hello"})


def test_an_unknown_name_is_permanent_and_says_what_is_known(jobs):
    with pytest.raises(UnknownJob, match="did you mean graph-generation") as caught:
        jobs.decode("graph-generaton", {"v": 1, "payload": {}})
    assert "known: graph-generation" in str(caught.value)
    assert decide(caught.value, AI, 0).outcome is Outcome.PERMANENT
    with pytest.raises(UnknownJob):
        jobs.encode("nothing-like-it", {})


@pytest.mark.parametrize("version", [0, 2, 99, -1])
def test_an_unknown_version_is_permanent_and_says_what_is_read(jobs, version):
    with pytest.raises(UnknownVersion, match=f"v{version}: this worker reads 1"):
        jobs.decode("graph-generation", {"v": version, "payload": {"document_id": "d"}})


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["v", "payload", "document_id", "meta"]) | st.text(), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_data_decodes_to_a_payload_or_a_permanent_error(data):
    jobs = JobTypes()
    jobs.register(name="graph-generation", payload=MakeGraph, handler=make_graph)
    try:
        _, payload = jobs.decode("graph-generation", data)
    except Permanent:
        return
    assert isinstance(payload, MakeGraph)


def test_refusals_never_quote_the_data(jobs):
    class Checked(BaseModel):
        card: str
        tags: dict[str, int] = Field(default_factory=dict)

        @field_validator("card")
        @classmethod
        def no_cards(cls, card: str) -> str:
            raise ValueError(f"never send {card}")

    def leaky(payload: dict[str, Any]):
        raise ValueError(f"cannot lift {payload}")

    jobs.register(name="pay", payload=Checked, handler=make_graph, version=2, upcasts={1: leaky})
    secret = "hunter2@example.org"
    for data in (
        {"v": 2, "payload": {"card": secret, secret: 1, "tags": {secret: "x"}}},
        {"v": 2, "payload": {"card": [secret]}},
        {"v": 1, "payload": {"card": secret}},
        {"v": secret, "payload": {}},
        {"v": 2, "payload": secret},
        secret,
    ):
        with pytest.raises(MalformedPayload) as caught:
            jobs.decode("pay", data)
        # Causes are printed too, and quote their input.
        shown = "".join(traceback.format_exception(caught.value))
        assert secret not in shown
        assert "pay" in str(caught.value)


def test_jobs_of_an_older_version_run_after_the_deploy():
    old = JobTypes()

    class V1(Payload):
        doc: str

    old.register(name="graph-generation", payload=V1, handler=make_graph)
    in_the_queue = over_the_wire(old.encode("graph-generation", V1(doc="d1")))

    def rename(payload: dict[str, Any]):
        payload["document_id"] = payload.pop("doc")
        return payload

    new = JobTypes()
    new.register(
        name="graph-generation",
        payload=MakeGraph,
        handler=make_graph,
        version=3,
        upcasts={1: rename, 2: lambda payload: {**payload, "pages": [1]}},
    )
    _, payload = new.decode("graph-generation", in_the_queue)
    assert payload == MakeGraph(document_id="d1", pages=[1])
    assert in_the_queue["payload"] == {"doc": "d1"}, "an upcast works on a copy: a retry starts from the same data"
    with pytest.raises(UnknownVersion, match="reads 1"):
        old.decode("graph-generation", new.encode("graph-generation", payload))


def test_mistakes_in_a_registration_are_found_at_import(jobs):
    def not_async(ctx, payload: MakeGraph): ...

    with pytest.raises(ValueError, match="registered already"):
        jobs.register(name="graph-generation", payload=MakeGraph, handler=make_graph)
    with pytest.raises(ValueError, match="leave a gap"):
        jobs.register(name="gap", payload=MakeGraph, handler=make_graph, version=3, upcasts={1: dict})
    with pytest.raises(ValueError, match="job name"):
        jobs.register(name="no spaces", payload=MakeGraph, handler=make_graph)
    with pytest.raises(TypeError, match="async def"):
        jobs.register(name="sync", payload=MakeGraph, handler=not_async)  # type: ignore[arg-type]
