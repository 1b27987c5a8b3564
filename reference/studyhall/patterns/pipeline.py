"""The execution of a job is a list of steps, from the outside in:

    pipeline = Pipeline(
        logged(), measured(metrics), traced(),
        signed(signer), typed(jobs),             # or plain(PrintLabel, print_label): data as others write it
        crash_budget(20), max_age(),
        limited(tenants), guarded(breaker),
        once(inboxes(store)), within_deadline(), reporting(), checkpointed(store),
    )
    worker = ReliableWorker("labels", pipeline, url=url)

Promise: every execution passes the steps in this order and ends in exactly one `Outcome`, whatever escapes the
handler, a BaseException included; `retry.decide` maps it, here and nowhere else. An order that cannot work is
refused here with the fix in the message. Each step lives in the module of its pattern: leave one out, replace
one, write your own (`async def step(run, call_next)`).

With `once` effects are effectively once: a crash at any step leads to another run, which finds the marker and
returns the stored result, or finds nothing and does the work. It does not hold for effects that a handler
performs outside its `Done.save`: give those a provider idempotency key (`ctx.provider_key("step")`).
"""

import traceback
from collections.abc import Sequence
from typing import Any

from .core.errors import Cancelled, Expired, FailPermanently, RetryLater, clean_text
from .core.execution import CallNext, JobContext, Step, uncancel
from .core.job import CANCELLED, Decision, Done, Outcome
from .core.redaction import redact_text
from .retry import decide

__all__ = ["Done", "JobContext", "Pipeline", "WrongOrder"]

TRACE_LINES = 12


class WrongOrder(ValueError):
    """These steps cannot work in this order."""


class Pipeline:
    """A BullMQ processor. `services` is handed to every handler as `ctx.services`."""

    def __init__(self, *steps: Step, services: Any = None) -> None:
        _check(steps)
        self.steps, self._services = steps, services
        self._run = _composed(steps)

    async def __call__(self, job: Any, token: str) -> Any:
        run = JobContext(job, token, self._services, self._judge, str(job.id), str(job.name), str(job.queue.name))
        try:
            return await self._run(run)
        except BaseException as error:
            decision = run.conclude(error)
            if decision.outcome is Outcome.CANCELLED:
                uncancel()
                return {CANCELLED: redact_text(decision.reason)}
            if decision.outcome is Outcome.RELEASED:
                raise
            raise _control(decision, error) from error

    def _judge(self, run: JobContext, error: BaseException) -> Decision:
        job = run.job
        # BullMQ counts starts and consumed attempts: the difference is how often the job came back for free.
        waits = max(0, job.attemptsStarted - 1 - job.attemptsMade)
        decision = decide(error, run.policy, job.attemptsMade, age=run.waited, waits=waits)
        if isinstance(error, Expired):
            return Decision(Outcome.EXPIRED, decision.reason)
        if isinstance(error, Cancelled):
            return Decision(Outcome.CANCELLED, str(error))
        return decision


def _composed(steps: Sequence[Step]) -> CallNext:
    call: CallNext = _handle
    for step in reversed(steps):
        call = _link(step, call)
    return call


def _link(step: Step, after: CallNext) -> CallNext:
    # Not partial(): a call from Python to Python costs half of one through C, and every job passes every step.
    return lambda run: step(run, after)


async def _handle(run: JobContext) -> Any:
    assert run.handler is not None
    answer = await run.handler(run, run.payload)
    if not run.transactional and isinstance(answer, Done):
        if answer.save is not None:
            raise FailPermanently("Done(save=…) needs a step that commits it: add once(inboxes(store))")
        return answer.result
    return answer


def _check(steps: Sequence[Step]) -> None:
    known: dict[str, str] = {}
    for step in steps:
        name = _name(step)
        if not callable(step):
            raise WrongOrder(f"{name} is not a step: a step is `async def step(run, call_next)`")
        for fact in getattr(step, "before", ()):
            if fact in known:
                raise WrongOrder(f"{name} has to stand before {known[fact]}, which gives the {fact}: move it up")
        for fact in getattr(step, "needs", ()):
            if fact not in known:
                giver = _GIVERS.get(fact, f"a step that gives the {fact}")
                raise WrongOrder(f"{name} needs the {fact}: put {giver} before it")
        for fact in getattr(step, "gives", ()):
            if fact in known:
                raise WrongOrder(f"{known[fact]} and {name} both give the {fact}: keep one of them")
            known[fact] = name
    if "payload" not in known:
        raise WrongOrder(f"nothing reads the job: add {_GIVERS['payload']}")


_GIVERS = {"payload": "typed(jobs) or plain(Model, handler)"}


def _name(step: object) -> str:
    name = getattr(step, "__qualname__", type(step).__name__)
    return f"{name.split('.')[0]}()"


def _control(decision: Decision, error: BaseException) -> Exception:
    reason = redact_text(decision.reason)  # it ends up in Redis, in the dead letters and on screens
    if not decision.consume_attempt:
        return RetryLater(decision.delay or 0.0, reason=reason)
    trace = redact_text(clean_text("".join(traceback.format_exception(error, limit=-TRACE_LINES))))
    if decision.delay is None:
        return FailPermanently(reason, trace=trace)
    return RetryLater(decision.delay, consume_attempt=True, reason=reason, trace=trace)
