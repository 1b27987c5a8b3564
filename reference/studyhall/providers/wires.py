"""How the two common protocols spell a request and an answer. Nothing here does I/O."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from studyhall.patterns.core.errors import Permanent, Transient

MAX_TOKENS = 8_000


class ModelRefused(Permanent):
    """The model declined to work on this document; asking again will not change that."""


class CutOff(Transient):
    """The answer was longer than the provider allows and ends in the middle."""


class Wire(Protocol):
    name: str
    path: str

    def headers(self, api_key: str) -> dict[str, str]: ...

    def request(self, model: str, task: str, text: str, schema: Mapping[str, Any]) -> dict[str, Any]: ...

    def answer(self, reply: Any) -> Any:
        """The model's JSON, parsed. LookupError, TypeError or ValueError when the reply has none."""
        ...


class AnthropicMessages:
    """A forced tool call: the tool's input is the answer, so there is no prose around the JSON."""

    name = "anthropic"
    path = "/v1/messages"

    def headers(self, api_key: str) -> dict[str, str]:
        return {"x-api-key": api_key, "anthropic-version": "2023-06-01"}

    def request(self, model: str, task: str, text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": model,
            "max_tokens": MAX_TOKENS,
            "system": task,
            "messages": [{"role": "user", "content": text}],
            "tools": [{"name": "answer", "description": "Give the answer.", "input_schema": dict(schema)}],
            "tool_choice": {"type": "tool", "name": "answer"},
        }

    def answer(self, reply: Any) -> Any:
        reason = reply["stop_reason"]
        if reason == "refusal":
            raise ModelRefused(str(ModelRefused.__doc__))
        if reason in ("max_tokens", "model_context_window_exceeded"):
            raise CutOff(str(CutOff.__doc__))
        return next(block["input"] for block in reply["content"] if block["type"] == "tool_use")


class ChatCompletions:
    """JSON mode with the schema in the prompt: what OpenAI and the servers that imitate it share."""

    name = "openai"
    path = "/v1/chat/completions"

    def headers(self, api_key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def request(self, model: str, task: str, text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        shape = json.dumps(schema, separators=(",", ":"))
        return {
            "model": model,
            "messages": [
                {"role": "system", "content": f"{task}\nAnswer with one JSON object of this JSON Schema: {shape}"},
                {"role": "user", "content": text},
            ],
            "response_format": {"type": "json_object"},
        }

    def answer(self, reply: Any) -> Any:
        choice = reply["choices"][0]
        if choice.get("finish_reason") == "content_filter" or choice["message"].get("refusal"):
            raise ModelRefused(str(ModelRefused.__doc__))
        if choice.get("finish_reason") == "length":
            raise CutOff(str(CutOff.__doc__))
        return json.loads(choice["message"]["content"])
