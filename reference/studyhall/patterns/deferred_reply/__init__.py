"""A chat command that takes longer than the platform waits: acknowledge at once, answer by a job."""

from .replies import (
    DISCORD,
    PONG,
    DeferredReplies,
    Interaction,
    NotSigned,
    TokenEnded,
    TokenUnknown,
    Unreadable,
    message,
    parse,
    received,
    split,
    verify,
)
from .webhook import InteractionWebhook

__all__ = [
    "DISCORD",
    "PONG",
    "DeferredReplies",
    "Interaction",
    "InteractionWebhook",
    "NotSigned",
    "TokenEnded",
    "TokenUnknown",
    "Unreadable",
    "message",
    "parse",
    "received",
    "split",
    "verify",
]
