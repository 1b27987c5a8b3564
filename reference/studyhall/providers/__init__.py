"""Who does the AI work: `open_provider(settings)` picks the local one or a remote model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .guarded import GuardedProvider
from .local import LocalProvider
from .protocol import Advance, AIProvider, OnProgress, TooLittleText
from .results import Concept, ConceptGraph, Explanation, Link, Question, Quiz

if TYPE_CHECKING:
    from studyhall.settings import Settings

__all__ = [
    "AIProvider",
    "Concept",
    "ConceptGraph",
    "Explanation",
    "GuardedProvider",
    "Link",
    "LocalProvider",
    "OnProgress",
    "Question",
    "Quiz",
    "Advance",
    "TooLittleText",
    "open_provider",
]

ADDRESSES = {"anthropic": "https://api.anthropic.com", "openai": "https://api.openai.com"}


def open_provider(settings: Settings) -> AIProvider:
    """The provider the settings name; `await provider.close()` when done."""
    if settings.provider == "local":
        return LocalProvider(pace=settings.provider_pace)
    from studyhall.settings import SettingsError

    from .http import HttpProvider
    from .wires import AnthropicMessages, ChatCompletions

    if not settings.provider_model:
        raise SettingsError(f"STUDYHALL_PROVIDER is {settings.provider}: name a model in STUDYHALL_PROVIDER_MODEL too")
    if not settings.provider_key and not settings.provider_url:
        # A server of your own may need no key; the public ones always do.
        raise SettingsError(f"STUDYHALL_PROVIDER is {settings.provider}: put its API key in STUDYHALL_PROVIDER_KEY")
    return HttpProvider(
        AnthropicMessages() if settings.provider == "anthropic" else ChatCompletions(),
        base_url=settings.provider_url or ADDRESSES[settings.provider],
        api_key=settings.provider_key or "none",
        model=settings.provider_model,
    )
