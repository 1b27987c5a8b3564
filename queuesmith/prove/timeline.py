"""What happened, in order: signals, submits, calls to providers, effects, log lines, starts and ends."""

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Event:
    at: float
    kind: str  # fault, start, stop, end, submit, call, effect, log
    text: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.at:9.3f} s  {self.kind:<6}  {self.key + ': ' if self.key else ''}{self.text}"


class Timeline:
    """Seconds since the run began. Written from several threads."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return time.monotonic() - self._began

    def add(self, kind: str, text: str, key: str = "", at: float | None = None) -> Event:
        with self._lock:
            event = Event(self.now() if at is None else at, kind, text, key)
            self._events.append(event)
            return event

    def events(self, *kinds: str, since: float = 0) -> list[Event]:
        with self._lock:
            events = [event for event in self._events if event.at >= since and (not kinds or event.kind in kinds)]
        return sorted(events, key=lambda event: event.at)

    def story(self, key: str, most: int = 7) -> str:
        """The shortest account of one key: what was done for it, and the faults in between."""
        own = [event for event in self.events() if event.key == key and event.kind != "log"]
        if not own:
            return f"{key}: nothing was ever heard of it"
        first, last = own[0].at, own[-1].at
        faults = self.events("fault", since=first)
        done = sum(event.kind in ("call", "effect") for event in own)
        after = [event for event in faults if event.at > last and done < 2][:1]
        events = sorted([*own, *(event for event in faults if event.at <= last), *after], key=lambda event: event.at)
        sent = [event for event in events if event.kind == "submit"]
        if len(sent) > 2:
            events = [event for event in events if event not in sent[1:]]
        if len(events) > most:
            events = [*events[: most - 2], *events[-2:]]
        parts = [f"{event.text} at {event.at:.2f} s" for event in events]
        if len(sent) > 2:
            parts.insert(0, f"sent {len(sent)} times")
        if not any(event.kind in ("effect", "call") for event in own):
            parts.append("no effect since")
        return f"{key}: {', '.join(parts)}"

    def write(self, folder: Path, extra: Iterable[Event] = ()) -> None:
        events = sorted([*self.events(), *extra], key=lambda event: event.at)
        (folder / "timeline.txt").write_text("".join(f"{event}\n" for event in events), encoding="utf-8")
        (folder / "timeline.json").write_text(json.dumps([asdict(event) for event in events]), encoding="utf-8")
