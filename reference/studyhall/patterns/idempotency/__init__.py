"""Work that may be delivered many times takes effect once."""

from __future__ import annotations

from .markers import Inbox, KeyReused, NotJson, Stored, fingerprint, inbox, provider_key

__all__ = ["Inbox", "KeyReused", "NotJson", "Stored", "fingerprint", "inbox", "provider_key"]
