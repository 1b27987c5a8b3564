"""Observability: one structured line and one measurement per execution, and no secrets in either.

Promise: every execution logs one line with job id, name, queue, attempt, outcome, duration, correlation id
and worker, and, if the job comes back, when (`retry_at`), as a JSON object written in one piece. The payload is never
part of it; errors, messages and extra fields are redacted (see `redaction`). The correlation id and the trace context
travel from the producer to the worker and on to child jobs. Metric labels are bounded: names found in a queue cannot
grow them forever.

Does not hold for handlers that somebody else adds to the root logger. Each process measures itself: scrape
every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Literal, TextIO

from ..core.execution import CallNext, JobContext, Step, before
from ..core.failures import clean_text
from ..core.job import Outcome, current_correlation_id, take_correlation
from ..core.redaction import redact, redact_text

__all__ = ["HumanLines", "JsonLines", "bind", "configure_logging", "log_execution", "logged"]

WORKER = f"{socket.gethostname()}:{os.getpid()}"
_WORKER = _quoted(WORKER)
_QUIET = (Outcome.CANCELLED, Outcome.RELEASED)
_LEVELS = {"retry": logging.WARNING, "permanent": logging.ERROR, "exhausted": logging.ERROR, "expired": logging.ERROR}

_fields: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039  never changed
_json = json.JSONEncoder(separators=(",", ":"), default=str).encode


@contextmanager
def bind(**fields: Any) -> Iterator[None]:
    """Add these fields to every line logged inside the block."""
    was = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(was)


def logged(log: logging.Logger | None = None) -> Step:
    """One line per execution, under the correlation id that its producer gave the job. The outermost step."""
    logger = log or logging.getLogger("jobs")

    @before("payload")
    async def logged(run: JobContext, call_next: CallNext) -> Any:
        error: BaseException | None = None
        retry: dict[str, str] = {}
        ours = take_correlation(run.correlation_id)
        started = time.perf_counter()
        try:
            return await call_next(run)
        except BaseException as raised:
            delay = run.conclude(raised).delay
            error = raised if run.outcome not in _QUIET else None
            retry = {"retry_at": _timestamp(time.time() + delay)} if delay is not None else {}
            raise
        finally:
            log_execution(
                logger,
                job_id=run.job_id,
                name=run.name,
                queue=run.queue,
                attempt=run.attempt,
                outcome=run.ended,
                duration=time.perf_counter() - started,
                error=error,
                **retry,
            )
            ours.var.reset(ours)

    return logged


def log_execution(
    logger: logging.Logger,
    *,
    job_id: object,
    name: str,
    queue: str,
    attempt: int,
    outcome: str,
    duration: float,
    error: BaseException | None = None,
    **extra: Any,
) -> None:
    """The one line of an execution, `duration` in seconds. A final failure is an error, a retry a warning."""
    level = _LEVELS.get(outcome, logging.INFO)
    if not logger.isEnabledFor(level):
        return
    if error is None and not extra and (lines := _only_output(logger, level)):
        text = _line(logger.name, level, str(job_id), name, queue, attempt, str(outcome), round(duration * 1000, 3))
        if lines.put(text):
            return
    fields = {
        "job_id": str(job_id),
        "name": name,
        "queue": queue,
        "attempt": attempt,
        "outcome": str(outcome),
        "duration_ms": round(duration * 1000, 3),
        **extra,
    }
    # The stack comes with the final failure only: five attempts do not need five copies.
    info = (type(error), error, error.__traceback__) if error and level == logging.ERROR else None
    if error is not None:
        fields["error"] = error
    # Not logger.log(): that walks the stack for the caller's file and line, which costs as much as the line.
    record = logger.makeRecord(logger.name, level, "", 0, "job %s", (outcome,), info)
    record.fields = fields
    logger.handle(record)


def _line(
    logger: str, level: int, job_id: str, name: str, queue: str, attempt: int, outcome: str, milliseconds: float
) -> str:
    """The line that `JsonLines` writes for a successful execution, without a record."""
    ident = current_correlation_id()
    cid = f'"correlation_id":{_quoted(ident)},' if ident else ""
    return (
        f'{{"ts":"{_timestamp(time.time())}","level":"{logging.getLevelName(level).lower()}",'
        f'"logger":{_quoted(logger)},"msg":"job {outcome}",{cid}"job_id":{_quoted(redact_text(job_id))},'
        f'"name":{_quoted(redact_text(name))},"queue":{_quoted(redact_text(queue))},"attempt":{attempt},'
        f'"outcome":"{outcome}","duration_ms":{milliseconds!r},"worker":{_WORKER}}}\n'
    )


def _only_output(logger: logging.Logger, level: int) -> Lines | None:
    """The handler of `configure_logging`, if it would write the line unchanged and nobody else wants the record."""
    at = logger
    while at.propagate and at.parent is not None and not at.handlers:
        at = at.parent
    last = at.parent is None or not at.propagate
    lines = at.handlers[0] if last and len(at.handlers) == 1 else None
    if not isinstance(lines, Lines) or type(lines.formatter) is not JsonLines or level < lines.level or _fields.get():
        return None
    changed = logger.filters or lines.filters or logging.getLogRecordFactory() is not logging.LogRecord
    return None if changed else lines


class Lines(logging.StreamHandler[TextIO]):
    """A handler whose lines may also come ready-made. Those of one turn of the event loop are written at its end, in
    one piece, and before any other record. A process that is killed loses the lines of that turn."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._ready: list[str] = []

    def put(self, line: str) -> bool:
        """False outside an event loop."""
        if not self._ready:
            try:
                asyncio.get_running_loop().call_soon(self.flush)
            except RuntimeError:
                return False
        self._ready.append(line)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write()
        except Exception:
            self.handleError(record)
        super().emit(record)

    def flush(self) -> None:
        self._write()
        super().flush()

    def _write(self) -> None:
        if self._ready:
            with self.lock or contextlib.nullcontext():
                ready, self._ready = self._ready, []
                self.stream.write("".join(ready))


class JsonLines(logging.Formatter):
    """A record as one line of JSON. Fields come from `extra={"fields": {...}}` and from `bind`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": redact_text(record.getMessage()),
        }
        if ident := current_correlation_id():
            line["correlation_id"] = ident
        if bound := _fields.get():
            line |= redact(bound)
        if fields := getattr(record, "fields", None):
            line |= redact(fields)
        line["worker"] = WORKER
        if record.exc_info and record.exc_info[1]:
            line["stack"] = redact_text("".join(traceback.format_exception(record.exc_info[1], limit=-12)))
        return _json(line)


class HumanLines(JsonLines):
    """The same content for a terminal: `12:00:01 info    job completed name=… job_id=…`."""

    def format(self, record: logging.LogRecord) -> str:
        line = json.loads(super().format(record))
        clock, level, msg = line.pop("ts")[11:19], line.pop("level"), line.pop("msg")
        stack = line.pop("stack", "")
        for quiet in ("logger", "worker"):
            line.pop(quiet)
        details = " ".join(f"{key}={value}" for key, value in line.items())
        # What somebody typed must not move the cursor, nor look like a line of its own.
        text = clean_text(f"{clock} {level:<7} {msg} {details}".rstrip()).replace("\n", "\\n")
        return text + "".join(f"\n    {part}" for part in clean_text(stack).splitlines())


def configure_logging(
    level: int | str = "INFO", stream: TextIO | None = None, style: Literal["json", "human"] = "json"
) -> logging.Handler:
    """Make this the only output of the process's logs: on stderr, or on `stream`. Call it once, first thing."""
    handler = Lines(stream or sys.stderr)  # writes a line with its newline in one call
    handler.setFormatter(JsonLines() if style == "json" else HumanLines())
    # Nothing here prints them, and looking them up is a third of the cost of a line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper() if isinstance(level, str) else level)
    for client in ("httpx", "httpx2"):  # at INFO they write every address, and in addresses there are tokens
        logging.getLogger(client).setLevel(logging.WARNING)
    return handler


_second: tuple[int, str] = (0, "")


def _timestamp(created: float) -> str:
    global _second  # noqa: PLW0603  strftime costs more than the rest of the line, and most lines share a second
    whole = int(created)
    if _second[0] != whole:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return f"{_second[1]}.{int((created - whole) * 1000):03d}Z"
