"""Chains and fan-ins as one request."""

import pytest

from studyhall.patterns.core.request import JobRequest
from studyhall.patterns.flow import Flows, FlowTooLarge, UnknownPolicy, chain, fan_in, on_failure


def step(name: str) -> JobRequest:
    return JobRequest("step", {}, key=name)


def test_each_step_waits_for_the_one_before():
    last = chain(step("extract"), step("graph"), step("quiz"))
    assert last.key == "quiz"
    assert [child.key for child in last.children] == ["graph"]
    assert [child.key for child in last.children[0].children] == ["extract"]


def test_what_a_failed_child_means_is_said_per_child():
    report = fan_in(step("report"), [step("needed"), *on_failure("ignore", step("nice"))])
    assert [(child.key, child.on_failure) for child in report.children] == [("needed", "wait"), ("nice", "ignore")]
    with pytest.raises(UnknownPolicy):
        on_failure("whatever", step("x"))


def test_a_flow_that_would_block_redis_is_refused():
    with pytest.raises(FlowTooLarge):
        Flows().check(chain(*(step(str(number)) for number in range(5_000))))
