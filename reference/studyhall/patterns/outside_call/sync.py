"""`OutsideCalls` for code without an event loop: scripts, Flask and Django views, Celery tasks.

    calls = SyncOutsideCalls(DbApiLedger(lambda: psycopg.connect(url)), "carrier", longest=30, key_life=86_400)
    label = calls.once(f"label/{parcel}", lambda key: carrier.print(parcel, idempotency_key=key, timeout=20))

The promise is that of `calls`, except that nothing here can end a request: give your HTTP client a timeout of at most
`longest` seconds. `InFlight` says in `delay` when to come back: `raise self.retry(countdown=error.delay)` in Celery.
"""

import time
from collections.abc import Callable
from typing import Any

from ..core.failures import Permanent
from .ledger import ENDED, NOTHING_HAPPENED, Call, InFlight, Next, NotMade, Rules, SyncLedger

__all__ = ["SyncOutsideCalls"]


class SyncOutsideCalls:
    def __init__(
        self,
        ledger: SyncLedger,
        provider: str,
        *,
        longest: float,
        key_life: float = 0.0,
        look_up: Callable[[str], Any] | None = None,
        tries: int = 5,
        record_for: float = 60.0,
    ) -> None:
        self._ledger, self._provider = ledger, provider
        self._look_up, self._record_for = look_up, record_for
        self._rules = Rules(longest, key_life, tries, look_up is not None)

    def once(self, key: str, send: Callable[[str], Any]) -> Any:
        """The provider's answer, now or from the ledger. `send(provider_key)` makes the call and returns JSON."""
        while True:
            began = time.monotonic()
            call = self._ledger.read(self._provider, key)
            if call.state in ENDED:
                return call.outcome()
            if call.ahead_of_clock():
                self._ledger.write(call.seen_now())
                continue
            step = self._rules.next(call)
            if step is Next.LOOK_UP and self._look_up is not None:
                if (answer := self._look_up(call.provider_key)) is not None:
                    self._ledger.write(call.answered(answer))
                    continue
                step = self._rules.after_look_up(call)
            if step is Next.SEND:
                return self._make(call.claimed(), send, began)
            self._ledger.write(call.set_aside())

    def unclear(self, limit: int = 100) -> list[Call]:
        """The calls that a human has to look at, oldest first."""
        return self._ledger.unclear(self._provider, limit)

    def resolve(self, key: str, *, done: Any = None, again: bool = False) -> None:
        """A human looked at the provider: the call was made, with this answer, or is to be made `again`."""
        call = self._ledger.read(self._provider, key)
        if not self._ledger.write(call.resolved(done, again)):
            raise Permanent(f"{key!r} was changed by somebody else just now: look again")

    def purge(self, older_than: float) -> int:
        """Forget done and refused calls older than this many seconds: longer than any job may take to come back."""
        return self._ledger.purge(self._provider, older_than)

    def _make(self, call: Call, send: Callable[[str], Any], began: float) -> Any:
        longest = self._rules.longest
        if not self._ledger.write(call):
            raise InFlight(2 * longest, f"another run is making the call {call.key!r}")
        try:
            if time.monotonic() - began > longest:
                raise NotMade("this process stood still between the claim and the request")
            ended = call.answered(send(call.provider_key))
        except NOTHING_HAPPENED:
            self._record(call.not_made())
            raise
        except Permanent as error:
            ended = call.refused(error)
        except Exception as error:
            raise self._rules.lost(call, error, began) from error
        return self._record(ended).outcome()

    def _record(self, call: Call) -> Call:
        deadline = time.monotonic() + self._record_for
        while True:
            try:
                return call if self._ledger.write(call) else self._ledger.read(call.provider, call.key)
            except Exception:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)
