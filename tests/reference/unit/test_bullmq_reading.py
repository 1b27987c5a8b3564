"""A job read the short way is the job that BullMQ's own reader makes."""

import json
from types import SimpleNamespace

from bullmq.job import Job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from studyhall.patterns.bullmq_worker.reading import _plain_job, read_job

QUEUE = SimpleNamespace(backend=object(), qualifiedName="bull:numbers")
COUNT = st.integers(0, 2**53).map(str)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "jobId": st.text(min_size=1),
        "attempts": st.integers(0, 9),
        "backoff": st.fixed_dictionaries({"type": st.sampled_from(["fixed", "own"]), "delay": st.integers(0, 9)}),
        "removeOnComplete": st.booleans() | st.integers(0, 9) | st.fixed_dictionaries({"age": st.integers(0, 9)}),
        "fpof": st.booleans(),
        "de": st.fixed_dictionaries({"id": st.text()}),
        "own": VALUE,
    },
)
FIELDS = st.fixed_dictionaries(
    {"name": st.text(min_size=1), "data": VALUE.map(json.dumps), "timestamp": COUNT, "ats": COUNT},
    optional=dict.fromkeys(("delay", "priority", "processedOn", "atm", "stc"), COUNT),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # by the clock: wrong on a crowded machine
@given(FIELDS, OPTIONS, st.booleans())
def test_a_job_that_has_only_begun_is_read_as_bullmq_reads_it(fields, options, compact):
    fields["opts"] = json.dumps(options, separators=(",", ":") if compact else None)
    reading = read_job(QUEUE, fields, "7")
    attributes = dict(vars(reading.job))
    assert attributes.pop("stored") == (reading.job.data, fields["data"])
    assert not reading.problem
    if not reading.repairs:
        assert attributes == vars(Job.fromJSON(QUEUE, fields, "7"))


def test_most_jobs_are_read_the_short_way_and_share_nothing():
    options = '{"jobId":"%s","attempts":3,"backoff":{"type":"fixed","delay":5}}'
    fields = {"name": "n", "data": "{}", "timestamp": "1", "ats": "1", "opts": options % "a"}
    first, second = _plain_job(QUEUE, fields, "a"), _plain_job(QUEUE, {**fields, "opts": options % "b"}, "b")
    assert first is not None
    assert second is not None
    first.opts["backoff"]["delay"] = 0
    first.opts.pop("attempts")
    first.stacktrace.append("x")
    assert second.opts == {"attempts": 3, "delay": 0, "backoff": {"type": "fixed", "delay": 5}, "jobId": "b"}
    assert second.stacktrace == []


def test_what_is_odd_gets_a_closer_look():
    plain = {"name": "n", "data": "{}", "timestamp": "1", "opts": '{"jobId":"a","attempts":3}'}
    assert _plain_job(QUEUE, plain, "a")
    odd = [
        *(
            {"opts": text}
            for text in ('{"jobId":"a",}', '{"jobId":"a\nb","lifo":true}', '{"jobId":"a\\"","lifo":true}')
        ),
        *({"opts": text} for text in ('{"jobId":"a","jobId":"b"}', '{"attempts":"x"}', '{"own":{"a":[]}}', "[]", "")),
        *({"data": text} for text in ("{} ", "{", "")),
        *({"timestamp": text} for text in ("", "-1", " 1", "1_0", "٣", "1" * 17)),
        {"stacktrace": "null"},
        {"name": ""},
    ]
    for fields in odd:
        assert _plain_job(QUEUE, {**plain, **fields}, "a") is None, fields
