"""One execution of one job, and the steps it passes.

A step of a pipeline is `async def step(run, call_next)`: it does its part, calls `await call_next(run)` for the
rest, and returns what that returned; what it raises ends the execution. One that only looks before may be a plain
`def` that returns `call_next(run)`: a coroutine less, which every wait of the job would pass through. `@needs(…)`,
`@gives(…)` and `@before(…)` say what a step relies on, so that an order that cannot work is refused when the
pipeline is built.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .failures import JobError, Transient
from .job import Deadline, Decision, Outcome, RetryPolicy, Save, provider_key, stop_reason

__all__ = ["CallNext", "JobContext", "MissingStep", "Step", "before", "gives", "needs", "uncancel"]

STARTS = 100_000  # of one job: more than it will ever have


class MissingStep(JobError):
    """The handler uses something that no step of this pipeline provides."""


@dataclass(eq=False)
class JobContext:
    """What steps and handlers know about an execution. Steps fill it in as the job passes them: until then those
    fields are the class's, which makes a context in half the time."""

    job: Any  # bullmq.Job
    token: str
    services: Any
    judge: Callable[[JobContext, BaseException], Decision]
    job_id: str = ""
    name: str = ""
    queue: str = ""
    started: float = field(default_factory=time.monotonic)

    # by the step that checks the signature: its field, where `text` is canonical JSON with that field last
    seal: str = field(default="", init=False)

    # by the step that decodes the job
    payload: Any = field(default=None, init=False)
    body: Any = field(default=None, init=False)  # the payload as it stands in the queue
    mark: str = field(default="", init=False)  # its fingerprint, where that is known
    handler: Callable[[JobContext, Any], Awaitable[Any]] | None = field(default=None, init=False)
    key: str = field(default="", init=False)  # the business key; the queue's own id where the job names none
    # the jobs among which the key is one request; empty: those of this name
    kind: str = field(default="", init=False)
    policy: RetryPolicy | None = field(default=None, init=False)
    deadline: Deadline | None = field(default=None, init=False)

    # by the steps that give handlers something
    store: Any = field(default=None, init=False)
    limit: float = field(default=math.inf, init=False)
    checkpointed: Any = field(default=None, init=False)  # the last state that an earlier run saved
    saves: list[Save] = field(default_factory=list)  # join the transaction of the effect
    transactional: bool = field(default=False, init=False)  # a step commits `saves` and `Done.save`
    _progress: Any = field(default=None, init=False)
    _reports: Callable[[], Any] | None = field(default=None, init=False)  # makes `_progress` for who asks for it
    _checkpoint: Callable[[Any, Save | None], Awaitable[None]] | None = field(default=None, init=False)

    # how it ended
    outcome: Outcome | None = field(default=None, init=False)
    _decision: tuple[BaseException, Decision] | None = field(default=None, init=False)

    @property
    def meta(self) -> dict[str, Any]:
        """What the producer said about the job; empty for data that is not our envelope."""
        data = self.job.data
        meta = data.get("meta") if isinstance(data, dict) else None
        return meta if isinstance(meta, dict) else {}

    @property
    def correlation_id(self) -> str | None:
        """The one in its data; our producer leaves it out where the job's own id serves."""
        data = self.job.data
        own = self.job_id if isinstance(data, dict) and "v" in data else None
        return self.meta.get("cid") or own

    @property
    def text(self) -> str | None:
        """The data as it stands in Redis; None if the worker kept no text, or a step replaced the data."""
        data, text = getattr(self.job, "stored", (None, None))
        return text if data is self.job.data else None

    @property
    def due(self) -> float:
        """When it was to start, in seconds since 1970. BullMQ sets `job.delay` to 0 when a job becomes due."""
        return float(self.job.timestamp + (self.job.opts.get("delay") or 0)) / 1000

    @property
    def waited(self) -> float:
        """Seconds from `due` until this run began, as the worker noted it: ours by the Redis server's clock."""
        return float(self.job.processedOn or time.time() * 1000) / 1000 - self.due

    @property
    def attempt(self) -> int:
        return int(self.job.attemptsMade) + 1

    @property
    def attempts(self) -> int:
        return (self.policy or RetryPolicy()).attempts

    @property
    def scope(self) -> str:
        """The key within this type of job: the stages of one document have the same key."""
        return f"{self.kind or self.name}/{self.key}"

    @property
    def fence(self) -> int:
        """The number of this run: higher than in every earlier run of the job, or of a job it replaces."""
        return int(self.job.timestamp) * STARTS + min(int(self.job.attemptsStarted), STARTS - 1)

    def remaining(self) -> float:
        """Seconds until the deadline stops this execution."""
        return max(0.0, self.started + self.limit - time.monotonic())

    def provider_key(self, step: str) -> str:
        """Idempotency key for a call to somebody else: the same for every attempt of this job."""
        return provider_key(self.scope, step)

    @property
    def progress(self) -> Any:
        if self._progress is None:
            if self._reports is None:
                raise MissingStep("add progress.reporting() to the pipeline to use ctx.progress")
            self._progress = self._reports()
        return self._progress

    async def checkpoint(self, state: Any, save: Save | None = None) -> None:
        """Remember where the work is; `save` puts the rows done so far into the same transaction."""
        if self._checkpoint is None:
            raise MissingStep("add checkpoint.checkpointed(store) to the pipeline to use ctx.checkpoint")
        await self._checkpoint(state, save)

    async def children(self) -> dict[str, Any]:
        """Results of the jobs this one waited for, by their Redis key."""
        return dict(await self.job.getChildrenValues())

    async def failed_children(self) -> dict[str, str]:
        """Children whose failure is ignored (see `flow`), by their Redis key: why they failed."""
        backend = self.job.queue.backend
        return dict(await backend.conn.hgetall(backend.toKey(f"{self.job.id}:failed")))

    def conclude(self, error: BaseException) -> Decision:
        """What `error` means for this job. Decided once, so that log, metrics and queue say the same."""
        if self._decision is None or self._decision[0] is not error:
            self._decision = (error, self._concluded(error))
        self.outcome = self._decision[1].outcome
        return self._decision[1]

    def _concluded(self, error: BaseException) -> Decision:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            reason = stop_reason(error)
            # Without a reason of ours the worker is draining or lost the lock; it knows which.
            return Decision(Outcome.RELEASED if reason is None else Outcome.CANCELLED, reason or "")
        if isinstance(error, asyncio.CancelledError):
            error = Transient("the handler let a CancelledError escape that nobody asked for")
        return self.judge(self, error)

    @property
    def ended(self) -> Outcome:
        """How it ended, for steps that look back: what a step set, or completed if nothing was raised."""
        return self.outcome or Outcome.COMPLETED


CallNext = Callable[[JobContext], Awaitable[Any]]
Step = Callable[[JobContext, CallNext], Awaitable[Any]]
S = TypeVar("S", bound=Callable[..., Any])


def needs(*facts: str) -> Callable[[S], S]:
    """This step works only behind a step that gives these facts."""
    return _marked("needs", facts)


def gives(*facts: str) -> Callable[[S], S]:
    """From this step on these facts are known."""
    return _marked("gives", facts)


def before(*facts: str) -> Callable[[S], S]:
    """This step is useful only before these facts are known."""
    return _marked("before", facts)


def _marked(what: str, facts: tuple[str, ...]) -> Callable[[S], S]:
    def mark(step: S) -> S:
        setattr(step, what, facts)
        return step

    return mark


def uncancel() -> None:
    """The cancellation was dealt with: what comes next must not be cut short by it."""
    if (task := asyncio.current_task()) is not None:
        while task.cancelling():
            task.uncancel()
