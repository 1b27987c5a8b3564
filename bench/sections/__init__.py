"""The parts of the benchmark. Each module here measures one thing for every peer and says how it is shown:

TITLE    heading in the report
ABOUT    a sentence or two: what was done, and how to read the table
COLUMNS  figure name -> `Column(label, unit, better, ratio)`, or `less(label, unit)`
words    optional: `def words(row)`, what the table says of a row that no run measures
ROUNDS   optional: at most this many rounds, for slow sections
measure  `def measure(lab) -> dict[str, dict[str, Value]]`: one round. Row -> figure name -> value. A row is the id of a
         peer, or any other name (shown as it is). None: not in this peer.
         A peer that fails is left out after `lab.failed(peer, error)`; the others go on.
"""

import importlib
from types import ModuleType

# The order of the report.
NAMES = (
    "ceiling",
    "throughput",
    "profile",
    "enqueue",
    "latency",
    "silence",
    "memory",
    "kills",
    "recovery",
    "backlog",
    "scheduler",
    "stores",
    "relay",
    "streams",
)
FULL_ONLY = ("profile", "recovery")  # unless asked for by name


def load(name: str) -> ModuleType:
    return importlib.import_module(f"bench.sections.{name}")
