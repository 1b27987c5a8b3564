"""Retry: who decides, how long it waits, and what a herd of clients does to a small server."""

import math
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studyhall.patterns.core.errors import (
    Cancelled,
    Permanent,
    RateLimited,
    ResourceBusy,
    RetryLater,
    Snooze,
    Transient,
    Unavailable,
)
from studyhall.patterns.core.job import Outcome, RetryPolicy
from studyhall.patterns.retry import AI, DEFAULT, DOCUMENTS, decide, forever, full_jitter, parse_retry_after, surviving

policies = st.builds(
    lambda base, factor, attempts: RetryPolicy(base, base * factor, attempts),
    st.floats(0.001, 100),
    st.floats(1, 10_000),
    st.integers(1, 20),
)


@settings(max_examples=1_000, deadline=None)
@given(policies, st.integers(0, 2_000), st.integers())
def test_delay_is_random_between_zero_and_the_capped_exponential(policy, attempt, seed):
    delay = full_jitter(policy, attempt, random.Random(seed))
    assert 0 <= delay <= min(policy.cap, policy.base * 2.0 ** min(attempt, 1_000))


@given(policies, st.integers(0, 2_000), st.integers(0, 10_000), st.floats(0, 1e9), st.integers())
def test_an_outage_consumes_neither_attempts_nor_age_and_its_delay_is_bounded(policy, attempts_made, waits, age, seed):
    alone, grouped = Unavailable("away"), ExceptionGroup("both", [Transient("late"), Unavailable("away")])
    for error in (alone, grouped):
        verdict = decide(error, policy, attempts_made, age=age, waits=waits, rng=random.Random(seed))
        assert (verdict.outcome, verdict.consume_attempt) == (Outcome.SNOOZED, False)
        assert verdict.delay is not None
        assert min(0.5 * 2.0 ** min(waits, 60), 30.0) <= verdict.delay <= 60.0


def test_delays_at_the_cap_differ_where_the_popular_formula_gives_one(figures, seed):
    rng, policy = random.Random(seed), AI
    at_the_cap = 10
    popular = {min(policy.cap, policy.base * 2**at_the_cap + rng.random()) for _ in range(1_000)}
    ours = [full_jitter(policy, at_the_cap, rng) for _ in range(1_000)]
    assert popular == {policy.cap}, "the naive twin cuts its jitter off at the cap"
    assert len(set(ours)) == 1_000
    buckets = Counter(int(delay / policy.cap * 10) for delay in ours)
    assert len(buckets) == 10
    assert min(buckets.values()) > 50, "spread over the whole range, not bunched"
    figures("retry", name="at the cap", draws=len(ours), distinct_naive=len(popular), distinct_ours=len(set(ours)))


def _storm(delay_after, clients, attempts, capacity):
    """Calls per 100 ms on a server that answers `capacity` of them and refuses the rest, in virtual time.

    All clients lost the same server at the same moment, so all make their first call together.
    """
    windows = {0: [0] * clients}  # window -> failures so far of each caller in it
    peak = succeeded = 0
    for _ in range(1_000_000):
        if not windows:
            break
        now = min(windows)
        callers = windows.pop(now)
        peak = max(peak, len(callers)) if now else peak
        succeeded += min(len(callers), capacity)
        for failures in callers[capacity:]:
            if failures + 1 < attempts:
                at = now + max(1, math.ceil(delay_after(failures) * 10))
                windows.setdefault(at, []).append(failures + 1)
    return {"peak_retries_per_100ms": peak, "succeeded": succeeded}


def test_a_storm_of_1000_clients_is_spread_by_full_jitter_and_repeats_itself_without(figures, seed):
    policy, rng = RetryPolicy(base=1, cap=30, attempts=5), random.Random(seed)
    shape = {"clients": 1_000, "attempts": policy.attempts, "capacity": 20}
    naive = _storm(lambda n: min(policy.cap, policy.base * 2**n), **shape)
    ours = _storm(lambda n: full_jitter(policy, n, rng), **shape)
    assert naive["peak_retries_per_100ms"] == 980, "the whole herd comes back in the same instant"
    assert naive["succeeded"] == 20 * policy.attempts
    assert ours["peak_retries_per_100ms"] < naive["peak_retries_per_100ms"] / 4
    assert ours["succeeded"] > naive["succeeded"] * 5
    measured = {f"no_jitter_{key}": value for key, value in naive.items()}
    measured |= {f"full_jitter_{key}": value for key, value in ours.items()}
    figures("retry", name="retry storm", **shape, **measured)


def _run_job(handler, policy):
    """What a worker does: run, and on an error do what `decide` says."""
    made = 0
    while True:
        try:
            handler()
            raise AssertionError("this provider never answers")
        except ConnectionError as error:
            decision = decide(error, policy, made)
        if decision.delay is None:
            return decision
        made += decision.consume_attempt


def test_retry_loops_multiply_so_the_handler_has_none(figures):
    calls = Counter[str]()

    def provider(caller):
        calls[caller] += 1
        raise ConnectionError("down")

    def naive_handler():
        for last in (False, False, True):
            try:
                provider("nested")
            except ConnectionError:
                if last:
                    raise

    policy = RetryPolicy(attempts=3)
    assert _run_job(naive_handler, policy).outcome is Outcome.EXHAUSTED
    assert _run_job(lambda: provider("ours"), policy).outcome is Outcome.EXHAUSTED
    assert calls == {"nested": 9, "ours": 3}
    figures("retry", name="nested loops", calls_nested=calls["nested"], calls_ours=calls["ours"])


@pytest.mark.parametrize(
    ("error", "outcome", "consumes"),
    [
        (Transient("503"), Outcome.RETRY, True),
        (KeyError("a bug"), Outcome.RETRY, True),
        (TimeoutError(), Outcome.RETRY, True),
        (RateLimited(retry_after=3), Outcome.SNOOZED, False),
        (ResourceBusy(), Outcome.SNOOZED, False),
        (Snooze(60), Outcome.SNOOZED, False),
        (Permanent("404"), Outcome.PERMANENT, True),
        (Cancelled(), Outcome.CANCELLED, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_the_class_of_the_error_decides(error, outcome, consumes):
    decision = decide(error, DEFAULT, 0)
    assert (decision.outcome, decision.consume_attempt) == (outcome, consumes)
    assert (decision.delay is None) == (outcome in {Outcome.PERMANENT, Outcome.CANCELLED})


def test_attempts_run_out_exactly_at_the_policy():
    made = [decide(Transient("x"), DOCUMENTS, n).outcome for n in range(5)]
    assert made == [Outcome.RETRY] * 4 + [Outcome.EXHAUSTED]
    assert decide(Transient("x"), RetryPolicy(attempts=1), 0).outcome is Outcome.EXHAUSTED
    assert "attempt 5 of 5" in decide(Transient("x"), DOCUMENTS, 4).reason


def test_waiting_consumes_no_attempt_however_often_but_ends_with_max_age():
    policy = RetryPolicy(attempts=1, max_age=3_600)
    error, age, waits = RateLimited(retry_after=30), 0.0, 0
    while (decision := decide(error, policy, 0, age=age, waits=waits)).delay is not None:
        assert decision.outcome is Outcome.SNOOZED
        assert not decision.consume_attempt
        age, waits = age + decision.delay, waits + 1
    assert decision.outcome is Outcome.EXPIRED
    assert waits > 100
    assert age > 3_500
    assert decide(Snooze(math.inf), policy, 0).outcome is Outcome.EXPIRED


@settings(max_examples=300, deadline=None)
@given(st.floats(0, 3_600), st.integers())
def test_retry_after_is_honoured_never_earlier_and_only_a_little_later(asked, seed):
    delay = decide(RateLimited(retry_after=asked), DEFAULT, 0, rng=random.Random(seed)).delay
    assert delay is not None
    assert asked <= delay <= asked + max(1.0, 0.1 * asked)


def test_clients_told_the_same_second_do_not_come_back_in_the_same_instant(seed):
    rng = random.Random(seed)
    delays = {decide(RateLimited(retry_after=10), DEFAULT, 0, rng=rng).delay for _ in range(1_000)}
    assert len(delays) == 1_000


@given(st.sampled_from([0.0, -5.0, math.nan]), st.sampled_from(["rate", "busy", "snooze"]))
def test_a_wait_of_zero_is_not_a_hot_loop(asked, kind):
    error = {"rate": RateLimited(retry_after=asked), "busy": ResourceBusy(retry_after=asked), "snooze": Snooze(asked)}[
        kind
    ]
    delay = decide(error, DEFAULT, 0).delay
    assert delay is not None
    assert delay >= 0.05


def test_a_busy_resource_is_asked_less_and_less_often_up_to_the_cap(seed):
    rng, error = random.Random(seed), ResourceBusy(retry_after=2)
    for waits, ceiling in [(0, 2), (1, 4), (4, 10), (10_000, DEFAULT.cap)]:
        delays = [decide(error, DEFAULT, 0, waits=waits, rng=rng).delay or 0 for _ in range(200)]
        assert all(ceiling / 2 <= delay <= ceiling for delay in delays)
        assert len(set(delays)) == 200


def test_the_decisive_member_of_a_group_decides():
    def group(*errors):
        return ExceptionGroup("unhandled errors in a TaskGroup", list(errors))

    assert decide(group(Transient("a"), group(Permanent("b"))), DEFAULT, 0).outcome is Outcome.PERMANENT
    assert decide(group(RateLimited(retry_after=9), ValueError()), DEFAULT, 0).outcome is Outcome.RETRY
    waits = decide(group(RateLimited(retry_after=9), RateLimited(retry_after=50)), DEFAULT, 0)
    assert waits.outcome is Outcome.SNOOZED
    assert (waits.delay or 0) >= 50
    assert decide(group(Permanent("a"), Cancelled()), DEFAULT, 0).outcome is Outcome.CANCELLED


NOW = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120),
        (" 1.5 ", 1.5),
        ("0", 0),
        ("Mon, 16 Nov 2026 12:02:00 GMT", 120),
        ("Mon, 16 Nov 2026 12:02:00 -0000", 120),
        ("Mon, 16 Nov 2026 14:02:00 +0200", 120),
        ("Mon, 16 Nov 2026 11:00:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400),
        ("9" * 5_000, 86_400),
        (None, None),
        ("", None),
        ("-5", None),
        ("soon", None),
        ("1e9", None),
        ("nan", None),
        ("١٢", None),
        ("Mon, 99 Nov 2026 12:02:00 GMT", None),
    ],
)
def test_retry_after_header_forms(header, seconds):
    assert parse_retry_after(header, NOW) == seconds


@given(st.text() | st.datetimes(timezones=st.just(UTC)).map(format_datetime))
def test_any_retry_after_header_gives_none_or_a_bounded_number(header):
    seconds = parse_retry_after(header, NOW, limit=600)
    assert seconds is None or 0 <= seconds <= 600


@pytest.mark.parametrize(
    "wrong",
    [
        *({"base": 0}, {"base": 5, "cap": 1}, {"attempts": 0}, {"max_age": 0}, {"cap": math.inf}),
        *({"floor": -0.1}, {"floor": 1.1}, {"max_waits": -1}, {"scale": -1}),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"base|attempts|max_age"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(60, 0, 30), (60, 1, 0.5), (math.inf, 1, 30), (math.nan, 1, 30), (-1, 1, 30)])
def test_an_outage_that_cannot_be_counted_is_refused(wrong):
    """A base of 0, tempting in tests, never came back; an endless outage was an OverflowError."""
    with pytest.raises(ValueError, match=r"base|forever"):
        surviving(wrong[0], base=wrong[1], cap=wrong[2])


# ---- policies that people ask for


@pytest.mark.slow
@settings(deadline=None)
@given(st.floats(0.1, 10_000), st.floats(0.1, 10), st.floats(1, 100), st.integers())
def test_surviving_bridges_the_outage_at_the_worst_draw_and_with_no_attempt_to_spare(seconds, base, factor, seed):
    policy = surviving(seconds, base=base, cap=base * factor)

    class Lowest(random.Random):
        def random(self):
            return 0.0

    def bridged(rng, attempts):
        return sum(full_jitter(policy, failure, rng) for failure in range(attempts - 1))

    assert bridged(Lowest(), policy.attempts) >= seconds * 0.999
    assert bridged(random.Random(seed), policy.attempts) >= seconds * 0.999
    assert bridged(Lowest(), policy.attempts - 1) < seconds * 1.001


def test_the_default_policy_bridges_three_seconds_at_best_and_surviving_an_hour():
    rng = random.Random(1)
    assert sum(full_jitter(DEFAULT, failure, rng) for failure in range(DEFAULT.attempts - 1)) < 3
    hour = surviving(3600)
    assert hour.attempts < 300
    outcomes = {decide(Transient("away"), hour, made).outcome for made in range(hour.attempts - 1)}
    assert outcomes == {Outcome.RETRY}
    assert decide(Transient("away"), hour, hour.attempts - 1).outcome is Outcome.EXHAUSTED


@given(st.integers(0, 100), st.integers())
def test_pauses_with_a_floor_grow_whatever_is_drawn(attempt, seed):
    policy = RetryPolicy(base=1, cap=2.0**80, floor=0.5)
    ceiling = 2.0 ** min(attempt, 64)
    assert 0.5 * ceiling <= full_jitter(policy, attempt, random.Random(seed)) <= ceiling


def test_never_giving_up_ends_by_a_permanent_error_alone():
    policy = forever()
    late = decide(Transient("away"), policy, 1_000_000, age=1e9)
    assert late.outcome is Outcome.RETRY
    assert late.delay is not None
    assert late.delay <= 300
    assert decide(Snooze(60), policy, 0, age=1e12, waits=10**6).outcome is Outcome.SNOOZED
    assert decide(Permanent("no"), policy, 0).outcome is Outcome.PERMANENT
    assert isinstance(policy.attempts, int), "BullMQ stores it"


@pytest.mark.parametrize("error", [Snooze(1), ResourceBusy(), RateLimited(retry_after=1)])
def test_free_waits_end_by_their_count(error):
    policy = RetryPolicy(max_waits=3)
    ends = [decide(error, policy, 0, waits=waits).outcome for waits in range(5)]
    assert ends == [Outcome.SNOOZED] * 3 + [Outcome.EXPIRED] * 2
    assert "waited 3 times of 3" in decide(error, policy, 0, waits=3).reason
    assert decide(Unavailable("away"), policy, 0, waits=99).outcome is Outcome.SNOOZED, "an outage is not counted"


def test_a_scale_of_zero_leaves_the_decisions_and_takes_the_pauses():
    policy = RetryPolicy(attempts=3, max_age=10)
    errors = [Transient("x"), Snooze(60), ResourceBusy(), RateLimited(retry_after=5), Unavailable("x")]
    errors += [Permanent("x"), RetryLater(7), RetryLater(7, consume_attempt=True)]
    for error in errors:
        plain, quick = decide(error, policy, 1), decide(error, replace(policy, scale=0), 1)
        assert quick.consume_attempt == plain.consume_attempt
        assert quick.outcome == plain.outcome
        assert quick.delay == (None if plain.delay is None else 0)
    assert decide(Snooze(4), replace(policy, scale=0.5), 0).delay == 2
