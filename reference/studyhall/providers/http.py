"""A remote model over HTTP: one request per step, every way it can fail turned into one of our error classes.

Promises
- 429 is `RateLimited` with the provider's own Retry-After, bounded; 5xx, timeouts and broken connections are
  `Transient`; other 4xx are `Permanent`; an answer that is not JSON or not of the asked shape is
  `MalformedAnswer` (`Transient`: a model may do better next time).
- No call outlives its limit. `asyncio.timeout` is around the whole exchange, because a read timeout starts
  again with every byte that drips in.
- Neither prompt nor key nor the provider's error text (which may quote both) reaches a log or an exception.
- Nothing is retried here: a loop inside a job of three attempts would make nine calls.

When they do not hold: the idempotency key only saves money where the provider honours it. A call that timed
out may have been carried out and billed.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from studyhall.patterns.core.errors import Permanent, RateLimited, Transient

from . import prompts
from .language import chunks, sentences
from .protocol import Advance, OnProgress, TooLittleText, time_left
from .results import ConceptGraph, Explanation, Link, Quiz
from .wires import Wire

CHUNK = 12_000  # characters per request: about 3,000 tokens
MAX_CHUNKS = 20  # requests one graph may cost at most; `coverage` tells when a document is longer
MAX_TEXT = CHUNK * MAX_CHUNKS
EXPLAIN_AT_ONCE = 6
MAX_REPLY = 2 * 1024 * 1024
MAX_WAIT = 600.0
DEFAULT_WAIT = 30.0
NO_CREDIT = {"insufficient_quota", "billing_error", "billing_hard_limit_reached"}

A = TypeVar("A", bound=BaseModel)


class ProviderDown(Transient):
    """The AI provider cannot be reached, is too slow or fails."""


class MalformedAnswer(Transient):
    """The model's answer is not what was asked for."""


class ProviderRefused(Permanent):
    """The AI provider will not take this request. Check its address, key, model and credit."""


class HttpProvider:
    """`timeout` is the limit of one request in seconds; the caller's deadline can only shorten it."""

    def __init__(self, wire: Wire, *, base_url: str, api_key: str, model: str, timeout: float = 90.0) -> None:
        self._wire = wire
        self._model = model
        self._timeout = timeout
        # People have the base address with or without the version; accept both.
        self._url = base_url.rstrip("/").removesuffix("/v1") + wire.path
        self._client = httpx2.AsyncClient(
            headers=wire.headers(api_key),
            timeout=httpx2.Timeout(timeout, connect=min(10.0, timeout), pool=min(10.0, timeout)),
            follow_redirects=False,  # a redirect would carry the key to wherever it points
        )

    @property
    def name(self) -> str:
        return f"{self._wire.name}/{self._model}"

    async def concept_graph(
        self, text: str, *, key: str, on_progress: OnProgress, deadline: float, resume: dict[str, Any] | None = None
    ) -> ConceptGraph:
        lines = sentences(text[:MAX_TEXT])
        parts = chunks(lines, size=CHUNK, at_most=MAX_CHUNKS)
        if not parts:
            raise TooLittleText(str(TooLittleText.__doc__))
        draft = prompts.GraphDraft.restored(resume, text)
        await on_progress(Advance("analysing", draft.next, len(parts)))
        for index in range(draft.next, len(parts)):
            task, body = prompts.concepts(" ".join(parts[index]), draft.names())
            draft.add(await self._ask(prompts.Concepts, task, body, f"{key}-part-{index + 1}", deadline))
            await on_progress(Advance("analysing", draft.next, len(parts), draft.state()))
        await on_progress(Advance("building", 0, 1))
        try:
            return draft.graph(lines, coverage=min(1.0, MAX_TEXT / len(text)))
        except ValidationError as error:
            raise _malformed("the concepts do not make a graph", error) from None

    async def quiz(
        self, text: str, graph: ConceptGraph, *, key: str, on_progress: OnProgress, deadline: float, questions: int = 8
    ) -> Quiz:
        task, body = prompts.quiz(text, graph, questions)
        answer = await self._ask(prompts.Questions, task, body, f"{key}-quiz", deadline)
        try:
            quiz = answer.quiz(text[:MAX_TEXT], questions)
        except ValidationError as error:
            raise _malformed("the questions cannot be used", error) from None
        await on_progress(Advance("writing", len(quiz.questions), questions))
        return quiz

    async def explain(
        self, connections: Sequence[Link], text: str, *, key: str, on_progress: OnProgress, deadline: float
    ) -> list[Explanation]:
        lines = sentences(text[:MAX_TEXT])
        explanations: list[Explanation] = []
        for start in range(0, len(connections), EXPLAIN_AT_ONCE):
            batch = connections[start : start + EXPLAIN_AT_ONCE]
            task, body = prompts.explanations(batch, lines)
            answer = await self._ask(prompts.Explanations, task, body, f"{key}-links-{start}", deadline)
            try:
                explanations += answer.for_links(batch, text[:MAX_TEXT])
            except (ValidationError, LookupError) as error:
                raise _malformed("the explanations do not match the connections", error) from None
            await on_progress(Advance("explaining", len(explanations), len(connections)))
        return explanations

    async def answer(self, question: str, text: str, *, key: str, deadline: float) -> str:
        task, body = prompts.answer(question, sentences(text[:MAX_TEXT]))
        return (await self._ask(prompts.Answered, task, body, f"{key}-answer", deadline)).text

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, shape: type[A], task: str, text: str, key: str, deadline: float) -> A:
        request = self._wire.request(self._model, task, text, shape.model_json_schema())
        limit = min(self._timeout, time_left(deadline))
        try:
            async with asyncio.timeout(limit):
                reply = await self._exchange(request, key)
        except TimeoutError:
            raise ProviderDown(f"{self._wire.name} gave no full answer within {limit:.1f} s") from None
        except httpx2.TimeoutException as error:
            raise ProviderDown(f"{self._wire.name} timed out ({type(error).__name__})") from None
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.LocalProtocolError):
            raise ProviderRefused(str(ProviderRefused.__doc__)) from None
        except httpx2.HTTPError as error:
            raise ProviderDown(f"the connection to {self._wire.name} failed ({type(error).__name__})") from None
        try:
            return shape.model_validate(self._wire.answer(json.loads(reply)))
        except ValidationError as error:
            raise _malformed("the answer has another shape", error) from None
        except (LookupError, TypeError, ValueError, AttributeError, StopIteration, RecursionError) as error:
            raise _malformed("the answer is not the JSON we asked for", error) from None

    async def _exchange(self, request: dict[str, Any], key: str) -> bytes:
        async with self._client.stream(
            "POST", self._url, json=request, headers={"idempotency-key": key[:255]}
        ) as response:
            body = bytearray()
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_REPLY:
                    raise MalformedAnswer(f"{self._wire.name} sent more than {MAX_REPLY} bytes")
        if response.status_code != 200:
            raise _error(self._wire.name, response, bytes(body))
        return bytes(body)


def _error(name: str, response: httpx2.Response, body: bytes) -> Exception:
    status, code = response.status_code, _error_code(body)
    reason = f"{name} answered {status}" + (f" ({code})" if code else "")
    if status == 429 and code not in NO_CREDIT:
        return RateLimited(reason, retry_after=retry_after(response.headers))
    if status >= 500 or status in (408, 409, 425):
        return ProviderDown(reason)
    return ProviderRefused(f"{reason}. {ProviderRefused.__doc__}")


def _error_code(body: bytes) -> str:
    """The machine-readable code only: error texts quote prompts and parts of keys."""
    try:
        error = json.loads(body)["error"]
        code = str(error.get("code") or error.get("type") or "")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return code if re.fullmatch(r"[a-z_]{1,60}", code) else ""


def retry_after(headers: httpx2.Headers) -> float:
    """Seconds to wait, from either form of Retry-After; never 0, never more than `MAX_WAIT`."""
    value = headers.get("retry-after", "").strip()
    wait = DEFAULT_WAIT
    try:
        wait = float(value)
    except ValueError:
        try:
            # The other side's clock is measured against itself: ours may be minutes off.
            now = headers.get("date")
            sent = parsedate_to_datetime(now).timestamp() if now else time.time()
            wait = parsedate_to_datetime(value).timestamp() - sent
        except (ValueError, TypeError, OverflowError):
            pass
    return min(MAX_WAIT, max(1.0, wait)) if math.isfinite(wait) else DEFAULT_WAIT


def _malformed(what: str, error: Exception) -> MalformedAnswer:
    # Only where it is wrong, never the value: pydantic and json quote what the model wrote about the text.
    where = ""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = f" at {'.'.join(str(part) for part in first['loc']) or 'the top'}: {first['type']}"
    return MalformedAnswer(f"{what} ({type(error).__name__}{where})")
