"""Reads a job as it stands in Redis, whoever wrote it: another language, an old version, a person at a prompt.

Promise: every job is read. A number, option or field that is not of BullMQ's form is ignored, as if it had not
been set (digits in quotes are taken as the number), and `Reading.repairs` are the fields to write back, because
BullMQ's scripts trip over them half-way: `atm = "x"` leaves a job in no state at all, and a `stacktrace` of
null stops every tool that lists the failed jobs. A job without name, data or options that can be parsed
comes as `problem`: fail it and keep the evidence.
It does not judge the data: that is the processor's job.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from json.scanner import make_scanner
from types import SimpleNamespace
from typing import Any, NamedTuple

from bullmq.job import Job

from ..core.failures import describe

__all__ = ["Reading", "read_job"]

LARGEST = 2**53  # what JSON, Lua and msgpack agree on
_is_count = re.compile("[0-9]{1,16}|-[0-9]{1,15}").fullmatch
COUNTERS = ("ats", "atm", "stc", "delay", "priority", "processedOn", "finishedOn")


class Reading(NamedTuple):
    job: Job
    repairs: Mapping[str, str] = {}  # fields of the job to write back before it runs
    problem: str = ""  # why the job can only fail
    ignored: Sequence[str] = ()  # the names of what was not of BullMQ's form


def read_job(queue: Any, fields: Mapping[str, str], job_id: str) -> Reading:
    return Reading(job) if (job := _plain_job(queue, fields, job_id)) else _examined(queue, fields, job_id)


def _plain_job(queue: Any, fields: Mapping[str, str], job_id: str) -> Job | None:
    """What `Job.fromJSON` makes of a job that has only begun, at half its cost: all but a few attributes follow from
    the options, which most jobs of a queue have in common. None: have a closer look."""
    options, text, own_id = fields.get("opts", "{}"), fields.get("data", "{}"), ""
    if options.startswith('{"jobId":"'):
        own_id, _, options = options[10:].partition('",')
        if not (options.startswith('"') and own_id.isprintable()) or '"' in own_id or "\\" in own_id:
            return None
        options = "{" + options
    numbers = [fields.get(name, "0") for name in _PLAIN_COUNTERS]
    counted = "".join(numbers)
    common = fields.keys() <= _PLAIN_FIELDS and "timestamp" in fields and fields.get("name") and _job_with(options)
    if not (common and counted.isdecimal() and counted.isascii() and all(numbers) and max(map(len, numbers)) <= 16):
        return None
    try:
        data, end = _scan(text, 0)  # json.loads(), but for the blanks around it
    except (StopIteration, ValueError, RecursionError):
        end = -1
    if end != len(text):
        return None
    job: Job = Job.__new__(Job)
    known = vars(job)
    known.update(common)
    opts = known["opts"] = {name: {**value} if type(value) is dict else value for name, value in common["opts"].items()}
    if own_id:
        opts["jobId"] = own_id
    known["timestamp"], known["processedOn"], known["delay"], known["priority"], *counts = map(int, numbers)
    known["attemptsStarted"], known["attemptsMade"], known["stalledCounter"] = counts
    known["name"], known["id"], known["data"], known["stacktrace"] = fields["name"], job_id, data, []
    known["queue"], known["backend"], known["queueQualifiedName"] = queue, queue.backend, queue.qualifiedName
    known["stored"] = (data, text)  # so that it is parsed once: see `JobContext.text`
    return job


@lru_cache(maxsize=256)
def _job_with(options: str) -> dict[str, Any] | None:
    """The attributes of a job with these options, if they are sound and a flat copy of them is a copy."""
    try:
        attributes = vars(Job.fromJSON(_NOWHERE, {"opts": options}, "0"))
    except Exception:  # not JSON, or options that exclude each other
        return None
    opts: dict[str, Any] = attributes["opts"]
    inner = [each for old in opts.values() for each in (old.values() if isinstance(old, dict) else [old])]
    flat = not any(isinstance(each, dict | list) for each in inner)
    return attributes if flat and _is_sound(options) and not opts.keys() & {"jobId", "parent"} else None


def _examined(queue: Any, fields: Mapping[str, str], job_id: str) -> Reading:
    repairs = _repairs(fields)
    ignored = [*repairs]
    try:
        text, wrong = _options(fields.get("opts", "{}"))
        if wrong:
            repairs["opts"] = text
            ignored += wrong
        job = Job.fromJSON(queue, {**fields, **repairs} if repairs else fields, job_id)
        job.stored = (job.data, fields.get("data"))
        if not job.name:
            raise ValueError("it has no name; was it evicted? Redis needs maxmemory-policy noeviction")
        return Reading(job, repairs, ignored=ignored)
    except Exception as error:  # never let a job nobody can read come back forever as stalled
        # Keep the evidence in a form that every tool can list.
        repairs |= {"name": "unreadable", "opts": "{}", "data": json.dumps({"unreadable": dict(fields)})}
        return Reading(Job(queue, "unreadable", None, {}, job_id), repairs, f"unreadable job: {describe(error)}")


def _repairs(fields: Mapping[str, str]) -> dict[str, str]:
    new: dict[str, str] = {}
    for name in COUNTERS:
        if name in fields and not _is_count(fields[name]):
            new[name] = str(_number(fields[name]) or 0)
    # From BullMQ 3; it overrides `atm`, which alone is counted: such a job never ends.
    if fields.get("attemptsMade"):
        counts = [_number(text) or 0 for text in (fields["attemptsMade"], fields.get("atm"))]
        new |= {"atm": str(max(counts)), "attemptsMade": ""}
    if not _is_count(fields.get("timestamp", "")):
        new["timestamp"] = str(_number(fields.get("timestamp")) or int(time.time() * 1000))
    if "stacktrace" in fields and not isinstance(_parsed(fields["stacktrace"]), list):
        new["stacktrace"] = "[]"
    if "progress" in fields and _parsed(fields["progress"]) is _BROKEN:
        new["progress"] = "0"
    if "parent" in fields or "parentKey" in fields:
        new |= _parent(fields)
    return new


def _options(text: str) -> tuple[str, list[str]]:
    """The options in BullMQ's form, and the names of those that were not."""
    return (text, []) if _is_sound(_JOB_ID.sub("", text, 1)) else _cleaned(text)


@lru_cache(maxsize=256)  # apart from ids, most jobs of a queue have the same
def _is_sound(text: str) -> bool:
    try:
        return not _cleaned(text)[1]
    except (ValueError, TypeError, RecursionError):
        return False


def _cleaned(text: str) -> tuple[str, list[str]]:
    options = json.loads(text)
    if not isinstance(options, dict):
        raise TypeError(f"its options are a {type(options).__name__}")
    clean = {name: value for name, old in options.items() if (value := _option(name, old)) is not None}
    wrong = [f"opts.{name}" for name, old in options.items() if clean.get(name) != old]
    return json.dumps(clean), wrong


def _parent(fields: Mapping[str, str]) -> dict[str, str]:
    """`parent` as JSON and `parentKey` say the same; the scripts need either none or both."""
    key, parent = fields.get("parentKey", ""), _parsed(fields.get("parent", "null"))
    queue, colon, ident = key.rpartition(":")
    good_key = not key or bool(queue and colon and ident)
    if good_key and ("parent" not in fields or (isinstance(parent, dict) and _texts(parent, "id", "queueKey"))):
        return {}
    # From the key, if that is good; an empty id means "no parent". (A script cannot delete a field.)
    if not good_key:
        key = queue = ident = ""
    return {"parentKey": key, "parent": json.dumps({"id": ident, "queueKey": queue})}


def _option(name: str, value: Any) -> Any:
    """The value of an option as BullMQ means it, None if it cannot be."""
    form = _FORMS.get(name)
    return value if form is None else form(value)


def _number(value: Any) -> int | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if math.isfinite(value) and abs(value) <= LARGEST else None


def _positive(value: Any) -> int | None:
    number = _number(value)
    return number if number is not None and number >= 0 else None


def _keep(value: Any) -> Any:
    if not isinstance(value, dict):
        return value if isinstance(value, bool) else _number(value)
    rule = {name: _positive(value.get(name)) for name in ("count", "age", "limit")}
    return {name: number for name, number in rule.items() if number is not None} or None


def _backoff(value: Any) -> Any:
    if not isinstance(value, dict):
        return _positive(value)
    if not isinstance(value.get("type"), str):
        return None
    numbers: dict[str, float] = {"delay": _positive(value.get("delay", 0)) or 0}
    if "jitter" in value:
        jitter = value["jitter"]
        numbers["jitter"] = jitter if isinstance(jitter, int | float) and 0 <= jitter <= 1 else 0
    return {**value, **numbers}


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _table(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _option_parent(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) and _texts(value, "id", "queue") else None


_FORMS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("attempts", "stackTraceLimit", "keepLogs", "kl"), _positive),
    **dict.fromkeys(("delay", "priority", "timestamp", "sizeLimit"), _number),
    **dict.fromkeys(("removeOnComplete", "removeOnFail"), _keep),
    **dict.fromkeys(("fpof", "cpof", "idof", "rdof", "lifo"), _flag),
    **dict.fromkeys(("failParentOnFailure", "continueParentOnFailure"), _flag),
    **dict.fromkeys(("ignoreDependencyOnFailure", "removeDependencyOnFailure"), _flag),
    **dict.fromkeys(("repeat", "de", "deduplication"), _table),
    "backoff": _backoff,
    "parent": _option_parent,
}
_BROKEN = object()
_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
_NOWHERE = SimpleNamespace(backend=None, qualifiedName="")
_PLAIN_COUNTERS = ("timestamp", "processedOn", "delay", "priority", "ats", "atm", "stc")
_PLAIN_FIELDS = {*_PLAIN_COUNTERS, "name", "data", "opts", "pb"}  # pb: who took it
_JOB_ID = re.compile(r',\s*"jobId":\s*"[^"\\]*"|"jobId":\s*"[^"\\]*",\s*')


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BROKEN


def _texts(table: dict[str, Any], *names: str) -> bool:
    return all(isinstance(table.get(name), str) for name in names)
