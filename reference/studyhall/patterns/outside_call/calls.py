"""An effect outside the database (a charge, a label, a text message), made once or known to be unclear.

    calls = OutsideCalls(StoreLedger(store), "carrier", longest=30, key_life=86_400, look_up=find_label)
    label = await calls.once(f"label/{parcel}", lambda key: carrier.print(parcel, idempotency_key=key))

Promise: a row says "in flight" before a request leaves. After a crash, a lost answer or a lost lock the next run
finds it, waits while the request may still be running (`InFlight`: consumes no attempt), then looks it up by our
reference, or sends the same idempotency key while that lives, or sets the call aside: `unclear()` lists it,
`resolve()` ends it, nothing repeats it silently. An answer is recorded even if its caller was cancelled (lost
lock, deadline, drain) and even if the ledger is away for `record_for` seconds; a run that was overtaken cannot
overwrite it. Every later run gets the recorded answer: what is done with it has attempts of its own, and so does
this call (`tries`).

What `send` raises decides: `Permanent` is recorded as refused; `NotMade`, `RateLimited`, `ResourceBusy` and `Snooze`
mean that the provider did nothing; anything else, a timeout too, is a request that may have been carried out.

When it does not hold
- The provider's word is wrong: a request that runs longer than `longest`, a key forgotten before `key_life`, a
  look-up that does not find what was made `longest` seconds ago. With both key and look-up, one of them may fail.
- A provider without keys, and a process frozen for longer than `longest` within the millisecond between the last
  look at the clock and the first byte of the request.
- The ledger loses what it confirmed: a second of Redis with `appendfsync everysec`, the last commits of SQLite at a
  power loss unless `synchronous=full`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..core.failures import Permanent
from .ledger import ENDED, NOTHING_HAPPENED, Call, InFlight, Ledger, Next, NotMade, Rules

__all__ = ["OutsideCalls"]

log = logging.getLogger("outside_call")
Send = Callable[[str], Awaitable[Any]]  # given the provider's idempotency key


class OutsideCalls:
    """The calls to one provider. Keep one per process, and `await close()` it at the end."""

    def __init__(
        self,
        ledger: Ledger,
        provider: str,
        *,
        longest: float,
        key_life: float = 0.0,
        look_up: Callable[[str], Awaitable[Any]] | None = None,
        tries: int = 5,
        record_for: float = 60.0,
    ) -> None:
        """`longest`: seconds after which the provider no longer works on a request; we then give ours up too.
        `key_life`: how long it remembers an idempotency key (24 h is usual), 0 if it takes none. `look_up(reference)`
        returns what was made under the key that `send` was given, None if nothing was."""
        self._ledger, self._provider = ledger, provider
        self._look_up, self._record_for = look_up, record_for
        self._rules = Rules(longest, key_life, tries, look_up is not None)
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def once(self, key: str, send: Send) -> Any:
        """The provider's answer, now or from the ledger. `send(provider_key)` makes the call and returns JSON."""
        while True:
            if running := self._running.get(key):  # e.g. of a run that lost its lock
                return await asyncio.shield(running)
            began = time.monotonic()
            call = await self._ledger.read(self._provider, key)
            if call.state in ENDED:
                return call.outcome()
            if call.ahead_of_clock():
                await self._ledger.write(call.seen_now())
                continue
            step = self._rules.next(call)
            if step is Next.LOOK_UP and self._look_up is not None:
                if (answer := await self._look_up(call.provider_key)) is not None:
                    await self._ledger.write(call.answered(answer))
                    continue  # another run wrote first: its entry counts
                step = self._rules.after_look_up(call)
            if step is Next.SET_ASIDE:
                await self._ledger.write(call.set_aside())
            elif key not in self._running:
                return await self._in_background(key, self._make(call.claimed(), send, began))

    async def unclear(self, limit: int = 100) -> list[Call]:
        """The calls that a human has to look at, oldest first."""
        return await self._ledger.unclear(self._provider, limit)

    async def resolve(self, key: str, *, done: Any = None, again: bool = False) -> None:
        """A human looked at the provider: the call was made, with this answer, or is to be made `again`."""
        call = await self._ledger.read(self._provider, key)
        if not await self._ledger.write(call.resolved(done, again)):
            raise Permanent(f"{key!r} was changed by somebody else just now: look again")

    async def purge(self, older_than: float) -> int:
        """Forget done and refused calls older than this many seconds: longer than any job may take to come back."""
        return await self._ledger.purge(self._provider, older_than)

    async def close(self) -> None:
        """Wait for the answers that are on their way, at most as long as a request may take."""
        if running := set(self._running.values()):
            await asyncio.wait(running, timeout=self._rules.longest + self._record_for)

    async def _in_background(self, key: str, work: Any) -> Any:
        """A cancelled caller goes, the request and its record do not: somebody may have been charged."""
        task = self._running[key] = asyncio.create_task(work, name=f"{self._provider} {key}")

        def ended(task: asyncio.Task[Any]) -> None:
            del self._running[key]
            if not task.cancelled():
                task.exception()  # nobody may be left to read it, and asyncio would complain

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def _make(self, call: Call, send: Send, began: float) -> Any:
        longest = self._rules.longest
        if not await self._ledger.write(call):
            raise InFlight(2 * longest, f"another run is making the call {call.key!r}")
        left = began + longest - time.monotonic()
        try:
            if left <= 0:  # frozen since the look at the ledger's clock: others count from there
                raise NotMade("this process stood still between the claim and the request")
            async with asyncio.timeout(left):
                ended = call.answered(await send(call.provider_key))
        except NOTHING_HAPPENED:
            await self._record(call.not_made())
            raise
        except Permanent as error:
            ended = call.refused(error)
        except Exception as error:
            raise self._rules.lost(call, error, began) from error
        return (await self._record(ended)).outcome()

    async def _record(self, call: Call) -> Call:
        """Record how it ended, through an outage of the ledger; returns what the ledger then holds."""
        deadline, pause = time.monotonic() + self._record_for, 0.1
        while True:
            try:
                return call if await self._ledger.write(call) else await self._ledger.read(call.provider, call.key)
            except Exception as error:
                if time.monotonic() > deadline:
                    log.error(
                        "%s %s is %s, and the ledger is away", call.provider, call.key, call.state, exc_info=error
                    )
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
