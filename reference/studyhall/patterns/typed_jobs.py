"""Typed jobs: a name, a version and a payload model, checked on enqueue and again at the worker.

Promise: what a worker runs was valid when it was enqueued and is valid now. An unknown name, an unknown
version or malformed data raises a `Permanent` error at once: no crash loop, no silent success, neighbours go
on. The message names what is known and where the data is wrong, never a value from it. Jobs of an older
version that are still in the queue run after a deploy, converted by `upcasts`.

Does not hold for a version newer than the worker knows: it fails permanently and waits in the dead letters
for a replay. So deploy workers before producers.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticSerializationError, from_json

from .core.execution import CallNext, JobContext, Step, gives
from .core.failures import Permanent
from .core.job import Deadline, RetryPolicy, current_correlation_id, new_correlation_id, take_correlation
from .core.plain_json import NotJson, check, fingerprint, member_fingerprint
from .core.request import AddNext, AddStep, Outgoing

__all__ = [
    "InvalidMaxAge",
    "JobType",
    "JobTypes",
    "MalformedPayload",
    "Payload",
    "UnknownJob",
    "UnknownVersion",
    "plain",
    "typed",
    "validated",
]

P = TypeVar("P", bound=BaseModel)
Handler = Callable[[Any, P], Awaitable[Any]]
Upcast = Callable[[dict[str, Any]], dict[str, Any]]
MINUTE = Deadline(60.0)
DEFAULT = RetryPolicy()
BIG = 4_096  # characters above which a payload is not encoded again
MAX_CID = 64  # characters of a correlation id
MAX_DIGITS = 4_300  # of an integer that Python reads
_LOSSY = re.compile("null|NaN|Infinity")  # may have been a number that JSON does not know


class UnknownJob(Permanent):
    """No job type of this name is registered here. Fix the name, or deploy the worker that knows it."""


class UnknownVersion(Permanent):
    """This worker cannot read that version. Deploy a newer worker, or register an upcast, then replay."""


class MalformedPayload(Permanent):
    """The data does not fit the job type's model. Fix the producer; the job never ran."""


class InvalidMaxAge(Permanent):
    """`max_age` is not a number of seconds above 0. Leave it out for work that never gets too old."""


class Payload(BaseModel):
    """Convenient parent for payload models: unknown fields are errors, and errors never show the input."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class JobType(Generic[P]):
    """One kind of job. `upcasts[n]` turns a payload of version n into one of version n + 1."""

    name: str
    payload: type[P]
    handler: Handler[P] = field(repr=False)
    version: int = 1
    queue: str = "default"
    retry: RetryPolicy = DEFAULT
    deadline: Deadline = MINUTE
    upcasts: Mapping[int, Upcast] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{0,99}", self.name):
            raise ValueError(f"job name {self.name!r}: letters, digits, dot, dash, underscore, up to 100")
        if not inspect.iscoroutinefunction(self.handler):
            raise TypeError(f"the handler of {self.name} must be `async def handler(ctx, payload)`")
        lifted = sorted(self.upcasts)
        if lifted and lifted != list(range(lifted[0], self.version)):
            raise ValueError(f"{self.name} v{self.version}: upcasts {lifted} leave a gap before this version")

    @property
    def versions(self) -> list[int]:
        """Every version that this job type reads."""
        return [*sorted(self.upcasts), self.version]


def typed(jobs: JobTypes, otherwise: Step | None = None) -> Step:
    """Read the job as one of `jobs`. `otherwise` reads what is not our envelope: `plain(…)`."""

    @gives("payload")
    def typed(run: JobContext, call_next: CallNext) -> Awaitable[Any]:
        data = run.job.data
        if otherwise is not None and not _is_envelope(data):
            # The same request in either form: they share their keys.
            run.kind = run.name
            return otherwise(run, call_next)
        if _is_envelope(data):
            run.mark = _mark(run, data)
        job_type, run.payload = jobs.decode(run.name, data, is_json=bool(run.mark))
        run.handler, run.policy, run.deadline = job_type.handler, job_type.retry, job_type.deadline
        run.body, run.key = data["payload"], data.get("key") or f"{run.queue}/{run.job_id}"
        return call_next(run)

    return typed


def _mark(run: JobContext, data: dict[str, Any]) -> str:
    if run.seal and (text := run.text) and len(text) > BIG:
        return member_fingerprint(text, data, "payload", run.seal)
    return fingerprint(data["payload"])  # refuses what `check` refuses: one look instead of two


def plain(
    payload: type[P],
    handler: Handler[P],
    *,
    key: Callable[[P], str] | None = None,
    kind: str = "",
    retry: RetryPolicy = DEFAULT,
    deadline: float | Deadline = MINUTE,
) -> Step:
    """Read the job's data as the payload itself, the way Node, an older version or another team writes it.

    `key` makes the business key of a payload, among the jobs of this name on this queue; without it the job is known
    by its id in its queue, and a producer that adds the same request twice makes two jobs with two effects. `kind`: one
    key, one effect, whatever the jobs are named: old senders say `refund`, new ones `task`. `retry` decides,
    whatever `attempts` the producer set. A job that fails is kept by the worker's rule: the producer's `removeOnFail:
    true` would leave no dead letter.
    """
    limit = deadline if isinstance(deadline, Deadline) else Deadline(deadline)

    @gives("payload")
    async def plain(run: JobContext, call_next: CallNext) -> Any:
        run.body = run.job.data
        run.job.opts.pop("removeOnFail", None)
        try:
            run.payload = payload.model_validate(run.body)
        except ValidationError as error:
            raise MalformedPayload(_complaint(run.name, payload, error)) from None
        run.key = key(run.payload) if key else f"{run.queue}/{run.job_id}"
        # Others name their jobs alike on every queue: order 7 is to be packed, and to be mailed.
        run.kind = run.kind or kind or f"{run.queue}/{run.name}"
        run.handler, run.policy, run.deadline = handler, retry, limit
        return await call_next(run)

    return plain


def validated(jobs: JobTypes) -> AddStep:
    """For a producer, as its first step: check the payload, and put it into the envelope that `typed` reads."""

    async def validated(outgoing: Sequence[Outgoing], call_next: AddNext) -> None:
        cid = current_correlation_id()
        # Without one, a job's own id serves, and is not stored; the jobs of a flow share a new one.
        if not cid and any(job.children or len(job.ref.id) > MAX_CID for job in outgoing):
            cid = new_correlation_id()
        for job in outgoing:
            _envelop(job, jobs, cid)
        token = take_correlation(cid or outgoing[0].ref.id)
        try:
            await call_next()
        finally:
            token.var.reset(token)

    validated.queue_of = lambda name: jobs[name].queue  # type: ignore[attr-defined]
    return validated


def _envelop(job: Outgoing, jobs: JobTypes, cid: str) -> None:
    request, retry = job.request, jobs[job.ref.name].retry
    meta: dict[str, Any] = {"cid": cid} if cid else {}
    if (max_age := request.max_age) is not None:
        if not (isinstance(max_age, int | float) and 0 < max_age < math.inf):
            raise InvalidMaxAge(f"max_age {str(max_age)[:50]}: {InvalidMaxAge.__doc__}")
        meta["max_age"] = max_age
    job.data = jobs.encode(job.ref.name, request.payload)
    if request.key:
        job.data["key"] = request.key
    if meta := meta | dict(request.meta):
        job.data["meta"] = meta
    job.opts["attempts"] = retry.attempts
    if retry.attempts <= job.opts.get("stackTraceLimit", 0):
        del job.opts["stackTraceLimit"]  # one for each attempt at most: there is nothing to limit
    # What a stock worker would do; ours computes the delay itself, with jitter.
    job.opts["backoff"] = {"type": "exponential", "delay": int(retry.base * 1000)}


def _is_envelope(data: object) -> bool:
    return isinstance(data, dict) and type(data.get("v")) is int and isinstance(data.get("payload"), dict)


class Options(TypedDict, total=False):
    """Options of a job type; see `JobType`."""

    version: int
    queue: str
    retry: RetryPolicy
    deadline: float | Deadline
    upcasts: Mapping[int, Upcast]


class JobTypes:
    """The registry that producers and workers share."""

    def __init__(self) -> None:
        self._types: dict[str, JobType[Any]] = {}

    @overload
    def register(
        self, *, name: str, payload: type[P], handler: Handler[P], **options: Unpack[Options]
    ) -> JobType[P]: ...

    @overload
    def register(
        self, *, name: str, payload: type[P], **options: Unpack[Options]
    ) -> Callable[[Handler[P]], JobType[P]]: ...

    def register(
        self, *, name: str, payload: type[P], handler: Handler[P] | None = None, **options: Unpack[Options]
    ) -> JobType[P] | Callable[[Handler[P]], JobType[P]]:
        """Add a job type; without `handler` it is a decorator that turns the function into its JobType."""
        if handler is None:
            return lambda decorated: self.register(name=name, payload=payload, handler=decorated, **options)
        limit = options.get("deadline", MINUTE)
        job_type = JobType(
            name=name,
            payload=payload,
            handler=handler,
            version=options.get("version", 1),
            queue=options.get("queue", "default"),
            retry=options.get("retry", DEFAULT),
            deadline=limit if isinstance(limit, Deadline) else Deadline(limit),
            upcasts=options.get("upcasts", {}),
        )
        if name in self._types:
            raise ValueError(f"job type {name} is registered already; a new payload is a new `version` of it")
        self._types[name] = job_type
        return job_type

    def encode(self, job: str | JobType[Any], payload: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
        """{v, payload} for the queue. Validated in the form in which the worker will read it."""
        job_type = self[job.name if isinstance(job, JobType) else job]
        try:
            given = payload if isinstance(payload, Mapping) else _dump(payload)
            body = _dump(job_type.payload.model_validate(given))
            job_type.payload.model_validate(body)  # what serialises does not always parse: find out here
        except ValidationError as error:
            raise MalformedPayload(
                _complaint(f"{job_type.name} v{job_type.version}", job_type.payload, error)
            ) from None  # its text quotes the payload
        except NotJson as error:
            raise MalformedPayload(f"{job_type.name}: {error}") from None
        except PydanticSerializationError:
            raise MalformedPayload(f"{job_type.name}: the payload has no JSON form") from None
        except (ValueError, RecursionError) as error:  # pydantic's words for cycles, depth and odd bytes
            raise MalformedPayload(f"{job_type.name}: the payload has no JSON form: {error}") from None
        return {"v": job_type.version, "payload": body}

    def decode(self, name: str, data: object, *, is_json: bool = False) -> tuple[JobType[Any], Any]:
        """The job type and the validated payload of a job taken from the queue, or a `Permanent` error. `is_json`: that
        was checked."""
        job_type = self[name]
        if not isinstance(data, dict) or not isinstance(data.get("payload"), dict):
            raise MalformedPayload(f"{name}: data is not an envelope {{v, payload}}, so use `encode` to enqueue")
        version, body = data.get("v"), data["payload"]
        if type(version) is not int:
            raise MalformedPayload(f"{name}: `v` is not a version number")
        if version != job_type.version and version not in job_type.versions:
            raise UnknownVersion(f"{name} v{version}: this worker reads {_listed(job_type.versions)}")
        for step in range(version, job_type.version):
            try:
                body = job_type.upcasts[step](copy.deepcopy(body))
            except Exception as error:
                why = f"{name}: the upcast from v{step} raised {type(error).__name__}"
                raise MalformedPayload(why) from None
        try:
            if not is_json or version != job_type.version:
                check(body)
            return job_type, job_type.payload.model_validate(body)
        except NotJson as error:
            raise MalformedPayload(f"{name}: {error}") from None
        except ValidationError as error:
            raise MalformedPayload(
                _complaint(f"{job_type.name} v{job_type.version}", job_type.payload, error)
            ) from None

    def find(self, name: str) -> JobType[Any] | None:
        return self._types.get(name)

    def __getitem__(self, name: str) -> JobType[Any]:
        if job_type := self._types.get(name):
            return job_type
        near = difflib.get_close_matches(str(name), self._types, 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise UnknownJob(f"no job type {str(name)[:100]!r}{hint} (known: {_listed(sorted(self._types))})")

    def __iter__(self) -> Iterator[JobType[Any]]:
        return iter(self._types.values())

    @property
    def queues(self) -> list[str]:
        """Names of the queues that these jobs live in."""
        return sorted({job_type.queue for job_type in self})


def _dump(payload: BaseModel) -> Any:
    with suppress(ValueError, RecursionError):  # what cannot be written is named by `check`, in our words
        text = payload.model_dump_json(by_alias=True)
        if len(text) <= MAX_DIGITS and not _LOSSY.search(text):
            return from_json(text)
    check(payload.model_dump())  # before: JSON mode silently turns NaN into None
    return payload.model_dump(mode="json", by_alias=True)


def _complaint(name: str, model: type[BaseModel], error: ValidationError) -> str:
    """Where and how, never what. A key that is not a field of the model came with the data: hidden too."""
    known = {str(name) for name in model.model_fields}
    known |= {str(f.alias) for f in model.model_fields.values() if f.alias}
    faults = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False)[:5]:
        path = [str(p) if isinstance(p, int) or p in known else "*" for p in fault["loc"]]
        faults.append(f"{'.'.join(path) or 'payload'} ({fault['type']})")
    more = f" and {error.error_count() - 5} more" if error.error_count() > 5 else ""
    return f"{name}: malformed at {', '.join(faults)}{more}"


def _listed(items: list[Any]) -> str:
    return ", ".join(map(str, items)) or "none"
