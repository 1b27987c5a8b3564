"""The trace of the request goes on in the job, and without an SDK nothing is made."""

from studyhall.patterns.tracing import continued, trace_meta

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def test_the_context_that_a_producer_sent_is_passed_on():
    assert trace_meta() == {}
    with continued(PARENT):
        assert trace_meta() == PARENT
    assert trace_meta() == {}
    with continued({"traceparent": 7}):  # nonsense of a foreign producer
        assert trace_meta() == {}
