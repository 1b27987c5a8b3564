"""Work that may be delivered many times takes effect once. The step of a pipeline is in `once`."""

from .markers import Inbox, KeyReused, NotJson, Stored, fingerprint, inbox, purge, result_of

__all__ = ["Inbox", "KeyReused", "NotJson", "Stored", "fingerprint", "inbox", "purge", "result_of"]
