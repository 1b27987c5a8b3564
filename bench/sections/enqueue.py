"""Jobs added per second, one by one and in bulk, by the peer's own producer."""

from __future__ import annotations

from bench.figures import Column, Value
from bench.lab import Lab

TITLE = "Enqueue"
ABOUT = (
    "One producer process that waits for every answer, no worker running; in bulk: the peer's own call for many jobs, "
    "500 at a time. A dash: it has none."
)
COLUMNS = {
    "single": Column("one by one", "jobs/s", ratio=True),
    "bulk": Column("in bulk", "jobs/s"),
    "gain": Column("bulk : single", "×"),
}


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    single, bulk = lab.scale(1_000, 4_000), lab.scale(3_000, 15_000)
    rows: dict[str, dict[str, Value]] = {}
    for peer in lab.peers:
        try:
            with lab.bench(peer) as bench:
                one = single / bench.enqueue(single)
                row: dict[str, Value] = {"single": round(one), "bulk": None, "gain": None}
                if peer.bulk:
                    many = bulk / bench.enqueue(bulk, bulk=True, first=single)
                    row |= {"bulk": round(many), "gain": round(many / one, 2)}
        except (RuntimeError, OSError) as error:
            lab.failed(peer, error)
            continue
        rows[peer.id] = row
        lab.say(f"{peer.title}: {row['single']:,}/s, in bulk {row['bulk'] or '–'}")
    return rows
