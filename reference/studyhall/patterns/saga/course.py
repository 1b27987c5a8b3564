"""Where a saga stands and what comes next: decided here without a server, carried out by `runner`.

The rules of `outside_call` decide about a request whose outcome is unknown: wait while it may still be running, then
look it up, or repeat it while its key lives, or leave it to a human. Its ledger is not used: the step's row says the
same, under the saga's fence, in a commit that is made anyway.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ..core.failures import Permanent
from ..core.job import RetryPolicy, provider_key
from ..outside_call.ledger import NOTHING_HAPPENED, Call, InFlight, Next, Rules, State
from ..retry import NEVER, decide
from .definition import AnyStep, Result, Saga, SagaStep, StepContext
from .store import Change, SagaRow, StepRow, note, redact

__all__ = ["Action", "Course", "Draft"]


class Draft:
    """A saga as its driver knows it, with the changes not yet written."""

    def __init__(self, saga: SagaRow, actor: str) -> None:
        self.saga, self.actor = saga, actor
        self.notes: list[Mapping[str, Any]] = []
        self.changed: set[int] = set()
        self.dirty = False

    def copy(self) -> Draft:
        same = Draft(self.saga, self.actor)
        same.notes, same.changed, same.dirty = [*self.notes], {*self.changed}, self.dirty
        return same

    def become(self, other: Draft) -> None:
        self.saga, self.notes, self.changed, self.dirty = other.saga, other.notes, other.changed, other.dirty

    def set(self, row: StepRow, **values: Any) -> StepRow:
        steps = list(self.saga.steps)
        steps[row.position] = _changed(steps[row.position], values)
        self.changed.add(row.position)
        self.change_saga(steps=tuple(steps))
        return steps[row.position]

    def change_saga(self, **values: Any) -> None:
        self.saga, self.dirty = _changed(self.saga, values), True

    def tell(self, event: str, row: StepRow | None = None, detail: str = "") -> None:
        self.notes.append(note(self.saga.id, self.actor, event, row.name if row else None, detail))
        self.dirty = True

    def unwritten(self) -> Change | None:
        """The changes to write; from then on they count as written."""
        if not self.dirty:
            return None
        change = Change(self.saga, [self.saga.steps[position] for position in self.changed], self.notes)
        self.notes, self.changed, self.dirty = [], set(), False
        return change


@dataclass(frozen=True)
class Action:
    """What to do once the draft is written. `row`: the step as it was before."""

    kind: Literal["look up", "send", "inside"]
    step: AnyStep
    row: StepRow
    began: float  # by the monotonic clock


@dataclass(frozen=True)
class Course:
    sagas: Mapping[str, Saga]
    margin: float

    @cached_property
    def lease(self) -> float:
        return self.margin + max(step.deadline for saga in self.sagas.values() for step in saga.steps)

    def next(self, draft: Draft) -> Action | None:
        """Puts the next step's intent into the draft, or the end, or the wait. None: nothing to do now."""
        steps, rows = self.sagas[draft.saga.name].steps, draft.saga.steps
        if [step.name for step in steps] != [row.name for row in rows]:
            return _needs_repair(draft, "its steps differ from the definition: rename a changed saga")
        if draft.saga.cancel is not None and not draft.saga.backward:
            _turn_back(draft, draft.saga.cancel)
        return self._backward(draft, steps) if draft.saga.backward else self._forward(draft, steps)

    def crashed(self, draft: Draft) -> None:
        """The previous process died with this saga: counted for the next step, before it runs."""
        seen = draft.copy()
        if (action := self.next(seen)) is not None:
            row = draft.saga.steps[action.row.position]
            draft.set(row, crashes=(row.crashes or 0) + 1)

    def found(self, draft: Draft, action: Action, effect: Result) -> Action | None:
        """`resolve` has answered for an earlier request."""
        step, row = action.step, action.row
        assert isinstance(step, SagaStep)
        if draft.saga.backward:
            if effect is not None:
                draft.set(row, result=_plain(effect))
            elif step.longest:  # there is no effect, and none can come any more
                draft.set(row, state="undone", since=None)
                draft.tell("nothing to undo", row, "it was looked up")
            else:
                return self._send(draft, step, row)
            return self.next(draft)
        if effect is not None:
            return self.done(draft, action, effect, "found done")
        return self._repeat(draft, step, row, _rules(step).after_look_up(_call(step, row, row.sent_at)))

    def done(
        self, draft: Draft, action: Action, result: Result, event: str = "done", *, stop: bool = False
    ) -> Action | None:
        """The step took effect, forward or backward. `stop`: then release the saga."""
        row = draft.saga.steps[action.row.position]
        ended: dict[str, Any] = {"since": None, "crashes": None}
        if draft.saga.backward:
            ended |= {"state": "undone", "undo_sent_at": None, "retry_at": None}
            draft.set(row, undo_attempts=row.undo_attempts + 1, **ended)
            draft.tell("undone", row)
        else:
            ended |= {"state": "done", "sent_at": None, "result": _plain(result)}
            draft.set(row, attempts=row.attempts + 1, **ended)
            draft.tell(event, row)
        return _free(draft, time.time()) if stop else self.next(draft)

    def failed(self, draft: Draft, action: Action, error: BaseException) -> Action | None:
        step, row, back = action.step, draft.saga.steps[action.row.position], draft.saga.backward
        counter, policy = _counting(step, back)
        tried, now = int(getattr(row, counter)), time.time()
        then = decide(error, policy, tried, age=now - (row.since or now))
        if action.kind == "send":
            sent = "undo_sent_at" if back else "sent_at"
            if isinstance(error, NOTHING_HAPPENED) and not isinstance(error, InFlight):
                draft.set(row, state=action.row.state, **{sent: getattr(action.row, sent)})
            elif isinstance(error, Permanent):  # an answer, so nothing is running any more
                draft.set(row, **{sent: 0.0})
        if then.delay is None:
            return self._give_up(draft, row, then.reason)
        again = now + then.delay
        draft.set(row, **{counter: tried + then.consume_attempt, "since": row.since or now})
        verb = "undo " if back else ""
        draft.tell(f"{verb}failed", row, f"{then.reason}; next try in {then.delay:.1f} s")
        return self._later(draft, row, again)

    def context(self, draft: Draft, action: Action) -> StepContext:
        saga = draft.saga
        row = saga.steps[action.row.position]
        key = provider_key(f"{saga.name}/{saga.id}", row.name)
        known = {step.name: step.result for step in saga.steps if step.result is not None}
        attempt = 1 + (row.undo_attempts if saga.backward else row.attempts)
        return StepContext(saga.id, saga.data, row.name, attempt, key, f"{key}-undo", row.result, known, saga.error)

    def _forward(self, draft: Draft, steps: Sequence[AnyStep]) -> Action | None:
        for row, step in zip(draft.saga.steps, steps, strict=True):
            if row.state != "done":
                return self._begin(draft, step, row)
        return _end(draft, "completed")

    def _backward(self, draft: Draft, steps: Sequence[AnyStep]) -> Action | None:
        """Strictly in reverse order, but past a waiting or stuck step if either of the two is independent."""
        blocked, soonest, stuck, now = False, None, None, time.time()
        for row in reversed(draft.saga.steps):
            step = steps[row.position]
            if row.state in ("pending", "undone"):
                continue
            if step.undo is None or (not isinstance(step, SagaStep) and row.result is None):
                draft.set(row, state="undone", since=None)
                draft.tell("nothing to undo", row)
                continue
            if blocked and not step.independent:
                continue
            if row.state == "stuck":
                stuck = stuck or row
            elif row.retry_at is not None and row.retry_at > now:
                soonest = min(row.retry_at, soonest or row.retry_at)
            else:
                return self._begin(draft, step, row)
            blocked = blocked or not step.independent
        if soonest is not None:
            return _free(draft, soonest)
        if stuck is not None:
            return _needs_repair(draft, draft.saga.error or f"undo of {stuck.name} is stuck")
        return _end(draft, "compensated")

    def _begin(self, draft: Draft, step: AnyStep, row: StepRow) -> Action | None:
        if (row.crashes or 0) >= step.crashes:
            return self._give_up(draft, row, f"its process died {row.crashes} times")
        if not isinstance(step, SagaStep):
            if draft.dirty:
                draft.change_saga(due_at=time.time() + self.lease)
            return Action("inside", step, row, time.monotonic())
        try:
            if draft.saga.backward:
                return self._begin_undo(draft, step, row)
            if row.state == "pending":
                return self._send(draft, step, row)
            return self._repeat(draft, step, row, _rules(step).next(_call(step, row, row.sent_at)))
        except InFlight as wait:
            draft.tell("waiting", row, str(wait))
            return self._later(draft, row, time.time() + wait.delay)

    def _begin_undo(self, draft: Draft, step: SagaStep, row: StepRow) -> Action | None:
        if row.result is None and _rules(step).next(_call(step, row, row.sent_at)) is Next.LOOK_UP:
            return self._look_up(draft, step, row)
        if row.state == "undoing":
            # Without keys, repeating an undo must be harmless.
            rules = replace(_rules(step), looks_up=not step.key_life)
            if rules.next(_call(step, row, row.undo_sent_at)) is Next.SET_ASIDE:
                return self._give_up(draft, row, "it may have been made, and its key is forgotten")
        return self._send(draft, step, row)

    def _repeat(self, draft: Draft, step: SagaStep, row: StepRow, then: Next) -> Action | None:
        if then is Next.LOOK_UP:
            return self._look_up(draft, step, row)
        if then is Next.SEND:
            return self._send(draft, step, row)
        why = "nobody knows whether it was made, and its key is forgotten: look there, then mark it or retry"
        return _needs_repair(draft, f"{row.name}: {why}", row)

    def _look_up(self, draft: Draft, step: SagaStep, row: StepRow) -> Action:
        draft.change_saga(due_at=time.time() + self.lease)
        return Action("look up", step, row, time.monotonic())

    def _send(self, draft: Draft, step: SagaStep, row: StepRow) -> Action:
        """Intent before effect: once it is committed, the step may have happened."""
        began, now, back = time.monotonic(), time.time(), draft.saga.backward
        intent = {"state": "undoing", "undo_sent_at": now} if back else {"state": "started", "sent_at": now}
        draft.set(row, since=row.since or now, retry_at=None, **intent)
        verb, counter = ("undo ", "undo_attempts") if back else ("", "attempts")
        draft.tell(f"{verb}started", row, f"attempt {getattr(row, counter) + 1}")
        draft.change_saga(due_at=now + self.lease)
        return Action("send", step, row, began)

    def _later(self, draft: Draft, row: StepRow, again: float) -> Action | None:
        if not draft.saga.backward and draft.saga.cancel is None:
            return _free(draft, again)
        if draft.saga.backward:
            draft.set(row, retry_at=again)
        return self.next(draft)  # others may be independent of it

    def _give_up(self, draft: Draft, row: StepRow, why: str) -> Action | None:
        if not draft.saga.backward:
            _turn_back(draft, f"{row.name}: {why}", row, why)
            return self.next(draft)
        draft.set(row, state="stuck")
        draft.change_saga(error=redact(f"undo of {row.name}: {why}"))
        draft.tell("undo gave up", row, why)
        return self.next(draft)


def _changed(row: Any, values: Mapping[str, Any]) -> Any:
    """As `dataclasses.replace`, which takes ten times as long."""
    new = object.__new__(type(row))
    vars(new).update(vars(row), **values)
    return new


def _rules(step: SagaStep) -> Rules:
    return Rules(step.longest, step.key_life, NEVER, step.resolve is not None)


def _call(step: SagaStep, row: StepRow, sent: float | None) -> Call:
    now = time.time()
    return Call(step.name, "", State.IN_FLIGHT, first=row.since or now, since=sent or 0.0, now=now)


def _counting(step: AnyStep, backward: bool) -> tuple[str, RetryPolicy]:
    return ("undo_attempts", step.undo_retry) if backward else ("attempts", step.retry)


def _turn_back(draft: Draft, why: str, row: StepRow | None = None, detail: str | None = None) -> None:
    for each in draft.saga.steps:  # the way back has its own attempts and time limit
        if each.since is not None or each.crashes:
            draft.set(each, since=None, crashes=None)
    draft.change_saga(state="compensating", backward=True, error=redact(why))
    draft.tell("compensating", row, why if detail is None else detail)


def _free(draft: Draft, due_at: float | None) -> Action | None:
    draft.change_saga(owner=None, due_at=due_at)
    return None


def _end(draft: Draft, state: str) -> Action | None:
    draft.change_saga(state=state)
    draft.tell(state)
    return _free(draft, None)


def _needs_repair(draft: Draft, why: str, row: StepRow | None = None) -> Action | None:
    draft.change_saga(state="needs_repair", error=redact(why))
    draft.tell("needs repair", row, why)
    return _free(draft, None)


def _plain(result: Result) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(result or {})))
    return plain
