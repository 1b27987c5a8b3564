"""Jobs added per second, one by one and in bulk, by the peer's own producer."""

from bench.figures import Column, Value
from bench.lab import Lab, Peer

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
    return lab.each_peer(once, lambda row: f"{row['single']:,}/s, in bulk {row['bulk'] or '–'}")


def once(lab: Lab, peer: Peer) -> dict[str, Value]:
    single, bulk = lab.scale(1_000, 4_000), lab.scale(3_000, 15_000)
    with lab.bench(peer) as bench:
        rate = single / bench.enqueue(single)
        row: dict[str, Value] = {"single": round(rate), "bulk": None, "gain": None}
        if peer.bulk:
            many = bulk / bench.enqueue(bulk, bulk=True, first=single)
            row |= {"bulk": round(many), "gain": round(many / rate, 2)}
    return row
